package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// Older tells whether tests run on Kubernetes 1.34, because CRUST_KUBERNETES names it,
// instead of the release that tools/kubernetes pins.
var Older = os.Getenv("CRUST_KUBERNETES") == "1.34"

// Programs gives the directory of the Kubernetes programs, and builds them where
// they are not there yet, which takes minutes.
var Programs = sync.OnceValues(func() (string, error) {
	if Older {
		return build("kubernetes.sh", "kubernetes-1.34")
	}
	return build("kubernetes.sh", "kubernetes")
})

// sidecars gives the directory of the CSI sidecars, with the types of snapshots in crd.
var sidecars = sync.OnceValues(func() (string, error) { return build("kubernetes.sh", "csi-sidecars") })

// containerd2 gives the directory of the containerd that is pinned.
var containerd2 = sync.OnceValues(func() (string, error) { return build("containerd.sh") })

// Build builds all of them. It is for before there is a namespace without a network.
func Build() error {
	_, kubernetes := Programs()
	_, containerd := containerd2()
	_, besides := sidecars()
	return errors.Join(kubernetes, containerd, besides)
}

// build runs one of the scripts that build and cache programs.
func build(script string, args ...string) (string, error) {
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", errors.New("where the source lies is unknown: build the tests without -trimpath")
	}
	path := filepath.Join(filepath.Dir(here), "../../../hack", script)
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return "", fmt.Errorf("%s: %w\n%s", path, err, exit.Stderr)
		}
		return "", err
	}
	return strings.TrimSpace(string(out)), nil
}
