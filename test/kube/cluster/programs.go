package cluster

import (
	"errors"
	"os"
	"sync"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// older is the release that CRUST_KUBERNETES names, 1.36 or 1.34, instead of the one that tools/kubernetes pins.
var older = os.Getenv("CRUST_KUBERNETES")

// Beta tells whether the release has mutating admission policies as a beta only.
var Beta = older == "1.34"

// Programs gives the directory of the Kubernetes programs, and builds them where
// they are not there yet, which takes minutes.
var Programs = sync.OnceValues(func() (string, error) {
	if older != "" {
		return rig.Script("kubernetes.sh", "kubernetes-"+older)
	}
	return rig.Script("kubernetes.sh", "kubernetes")
})

// sidecars gives the directory of the CSI sidecars, with the types of snapshots in crd.
var sidecars = sync.OnceValues(func() (string, error) { return rig.Script("kubernetes.sh", "csi-sidecars") })

// Build builds all of them. It is for before there is a namespace without a network.
func Build() error {
	_, kubernetes := Programs()
	_, containerd := cri.Programs()
	_, besides := sidecars()
	return errors.Join(kubernetes, containerd, besides)
}
