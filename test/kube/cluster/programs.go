package cluster

import (
	"errors"
	"os"
	"sync"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// Older tells whether tests run on Kubernetes 1.34, because CRUST_KUBERNETES names it,
// instead of the release that tools/kubernetes pins.
var Older = os.Getenv("CRUST_KUBERNETES") == "1.34"

// Programs gives the directory of the Kubernetes programs, and builds them where
// they are not there yet, which takes minutes.
var Programs = sync.OnceValues(func() (string, error) {
	if Older {
		return rig.Script("kubernetes.sh", "kubernetes-1.34")
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
