// Package examples runs what examples/ has: the driver, behind the front of a daemon, and the
// runtime handler, by containerd.
package examples
