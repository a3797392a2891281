// Package fsops is what is done to a mounted filesystem, given a descriptor of its
// root directory: giving it to a group, telling its use and its health, growing,
// freezing and thawing it. It never looks anything up outside of that directory.
//
// It needs the kernel's own calls only, so that a program that starts thousands of
// times a day can have it.
package fsops
