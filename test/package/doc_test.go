// Package package_test builds the packages, installs the .deb on this machine,
// looks at what it brought, and removes and purges it again.
package package_test
