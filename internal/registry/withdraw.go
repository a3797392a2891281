package registry

import (
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// withdrawTimeout bounds the look whether anybody serves a socket.
const withdrawTimeout = time.Second

// Withdraw removes our registration sockets from kubelet's directory that nobody
// serves, and gives their paths. kubelet then deregisters their drivers: it would
// call CSI sockets that nobody serves either, and would refuse the drivers
// themselves, for their names are taken.
func Withdraw(kubeletRegistry string) []string {
	var gone []string
	for path := range socketsBelow(kubeletRegistry) {
		if strings.HasSuffix(path, Suffix) && !isServed(path) && os.Remove(path) == nil {
			gone = append(gone, path)
		}
	}
	slices.Sort(gone)
	return gone
}

func isServed(path string) bool {
	conn, err := net.DialTimeout("unix", path, withdrawTimeout)
	if err == nil {
		_ = conn.Close()
		return true
	}
	return !errors.Is(err, syscall.ECONNREFUSED)
}
