// Package daemon tests the real daemon from outside: over its sockets, with signals, and with SIGKILL at every step.
package daemon
