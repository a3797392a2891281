package registry

import (
	"os"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// Withdraw removes our registration sockets from kubelet's directory that nobody
// serves, and gives their paths. kubelet then deregisters their drivers: it would
// call CSI sockets that nobody serves either, and would refuse the drivers
// themselves, for their names are taken.
func Withdraw(kubeletRegistry string) []string {
	var gone []string
	now, _ := socketsIn(kubeletRegistry, true) // those that cannot be seen stay
	for path := range now.found {
		served, err := sys.IsServed(path)
		if strings.HasSuffix(path, Suffix) && !served && err == nil && os.Remove(path) == nil {
			gone = append(gone, path)
		}
	}
	slices.Sort(gone)
	return gone
}
