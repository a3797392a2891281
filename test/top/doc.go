// Package top tests crustctl top on a terminal, against a daemon whose volumes
// have emulated sandboxes.
package top
