package registry

import (
	"os"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Withdraw removes our registration sockets that nobody serves from kubelet's directory, and
// returns their paths. kubelet then deregisters their drivers. Otherwise it would call CSI
// sockets that nobody serves either, and refuse the drivers' own registrations, because their
// names are taken.
func Withdraw(kubeletRegistry string) []string {
	var gone []string
	now, _ := socketsIn(kubeletRegistry, true) // those that cannot be listed stay
	for path := range now.found {
		served, err := sys.IsServed(path)
		if strings.HasSuffix(path, Suffix) && !served && err == nil && os.Remove(path) == nil {
			gone = append(gone, path)
		}
	}
	slices.Sort(gone)
	return gone
}
