//go:build !race

package daemon

// slower is 1 without the race detector.
const slower = 1
