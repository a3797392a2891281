// Package fsops works on a mounted filesystem, given a descriptor of its root directory:
// it changes the group of all files, measures usage and health, grows, freezes and thaws.
// It never resolves a path outside of that directory.
//
// It uses system calls only and has few dependencies, because crust-runc, which starts
// thousands of times a day, imports it.
package fsops
