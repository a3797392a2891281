//go:build race

package daemon

// slower is how much the race detector slows a program down.
const slower = 8
