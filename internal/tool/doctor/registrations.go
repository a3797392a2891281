package doctor

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// directSuffix ends the name of the usual registrar's socket, and frontSuffix that of the
	// front's socket.
	directSuffix = "-reg.sock"
	frontSuffix  = ".crust-proxy" + directSuffix

	registrationWait = time.Second
)

// checkRegistrations finds drivers that register with kubelet directly and not with the front,
// such as one whose upgrade has undone the changed path. kubelet has one endpoint for a name,
// and would call the driver for volumes that the front has deferred. Only files are read, so
// that the check works with the daemon down, too.
func checkRegistrations(ctx context.Context, n Node, _ Daemon) []Finding {
	dir := cmp.Or(n.KubeletRegistry, filepath.Join(n.KubeletRoot, "plugins_registry"))
	front, direct, err := registrations(n, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return []Finding{okay("no driver has registered with kubelet: there is no %s", dir)}
	}
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "%s cannot be looked at: %v", dir, err)}
	}
	var found []Finding
	for _, name := range slices.Sorted(maps.Keys(front)) {
		for _, socket := range direct[name] {
			found = append(found, directFinding(ctx, n, name, socket))
		}
	}
	return orOK(found, "%d drivers are registered through crust-proxy, and none of them with kubelet directly", len(front))
}

// registrations lists the drivers of the front, and the sockets of direct registrations by the
// driver in their names. kubelet searches sub-directories, too.
func registrations(n Node, dir string) (front map[string]bool, direct map[string][]string, err error) {
	front, direct = map[string]bool{}, map[string][]string{}
	root := n.at(dir)
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != root {
			return nil // it was removed meanwhile
		}
		if err != nil || entry.Type() != fs.ModeSocket {
			return err
		}
		if name, ours := strings.CutSuffix(entry.Name(), frontSuffix); ours {
			front[name] = true
		} else {
			name = strings.TrimSuffix(name, directSuffix)
			direct[name] = append(direct[name], filepath.Join(dir, strings.TrimPrefix(path, root)))
		}
		return nil
	})
	return front, direct, err
}

// directFinding distinguishes a driver that is registered directly from a socket that a
// registrar left when it ended. When a direct registration ends, kubelet removes the driver by
// its name, and with it the front's registration.
func directFinding(ctx context.Context, n Node, name, socket string) Finding {
	ready := "then see that crustctl drivers shows it ready, else: " + n.Service.Restart()
	if errors.Is(n.dial(ctx, socket, registrationWait), syscall.ECONNREFUSED) {
		return warning("rm "+quoted(socket)+"; "+ready,
			"the driver %s is registered through crust-proxy, and %s is left of a direct registration that nobody serves", name, socket)
	}
	registry := cmp.Or(n.FrontRegistry, filepath.Join(n.KubeletRoot, "crust-proxy/registry"))
	return failure("let the hostPath of the registration directory in the driver's DaemonSet be "+registry+" (an upgrade may have undone it); "+ready,
		"the driver %s registers with kubelet directly (%s) beside its registration through crust-proxy: kubelet may call it past "+
			"crust-proxy, also for volumes that are deferred", name, socket)
}
