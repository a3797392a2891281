package cluster

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// Programs gives the directory of the Kubernetes programs, and builds them where
// they are not there yet, which takes minutes.
var Programs = sync.OnceValues(func() (string, error) { return build("kubernetes.sh") })

// containerd2 gives the directory of the containerd that is pinned.
var containerd2 = sync.OnceValues(func() (string, error) { return build("containerd.sh") })

// Build builds all of them. It is for before there is a namespace without a network.
func Build() error {
	_, kubernetes := Programs()
	_, containerd := containerd2()
	return errors.Join(kubernetes, containerd)
}

// build runs one of the scripts that build and cache programs.
func build(script string) (string, error) {
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", errors.New("where the source lies is unknown: build the tests without -trimpath")
	}
	path := filepath.Join(filepath.Dir(here), "../../../hack", script)
	out, err := exec.Command(path).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return "", fmt.Errorf("%s: %w\n%s", path, err, exit.Stderr)
		}
		return "", err
	}
	return strings.TrimSpace(string(out)), nil
}
