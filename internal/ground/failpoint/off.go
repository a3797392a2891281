//go:build !failpoints

package failpoint

// Hit does nothing in a release build.
func Hit(string) {}
