//go:build !amd64

package confine

var deniedHere []uint32
