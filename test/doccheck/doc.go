// Package doccheck holds the tests of what is written for people: that links lead
// somewhere, and that what pages name is there.
package doccheck
