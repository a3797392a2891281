// Package handler is what the reference runtime handlers have in common: runc's
// command line and its log, the configuration, the commands about volumes, and how
// a process and a device are known for what they are.
package handler
