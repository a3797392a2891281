//go:build system

package front

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func indexByte(s string, c byte) int { return strings.IndexByte(s, c) }

func (n *node) unmount(point string) {
	n.t.Helper()
	check.Must(n.t, unix.Unmount(point, unix.MNT_DETACH))
}

func (n *node) detach(loop string) {
	n.t.Helper()
	check.Must(n.t, loopdev.Detach(loop))
}
