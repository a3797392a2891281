package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

const containerdWait = 2 * time.Second

// checkRuntime connects to the program from which the daemon learns of sandboxes.
func checkRuntime(ctx context.Context, n Node, _ Daemon) (found []Finding) {
	for _, socket := range []string{n.Config.Containerd.Socket, n.Config.CRI.Socket} {
		if socket == "" {
			continue
		}
		switch err := n.dial(ctx, socket, containerdWait); {
		case err == nil:
			found = append(found, okay("the container runtime accepts connections on %s", socket))
		case errors.Is(err, fs.ErrPermission):
			found = append(found, skipped("the container runtime's socket %s was not tried (run as root)", socket))
		default:
			found = append(found, warning("systemctl status containerd; where the socket is another one, set containerd.socket in crust-proxy's configuration; "+
				"for CRI-O set that to \"\" and cri.socket to /run/crio/crio.sock",
				"the container runtime cannot be reached on %s (%v): the end of sandboxes is detected late; with Kata, those of its Rust runtime are not found, and volumes may stay", socket, errors.Unwrap(err)))
		}
	}
	return orOK(found, "no container runtime is used by this daemon's configuration")
}

const (
	crioConfig = "/etc/crio/crio.conf"
	crioDropIn = "/etc/crio/crio.conf.d"
)

func checkCRIO(_ context.Context, n Node, d Daemon) []Finding {
	if !strings.HasSuffix(n.Config.CRI.Socket, "/crio.sock") {
		return []Finding{okay("CRI-O is not used by this daemon's configuration")}
	}
	if d.up() && !d.has("crust") {
		return []Finding{okay("crust-runc is not used")}
	}
	return checkInfra(n)
}

// checkInfra fails unless CRI-O runs an infra process in each sandbox. The pod's volumes stay
// mounted as long as that process lives.
func checkInfra(n Node) []Finding {
	const do = "write `[crio.runtime]` and `drop_infra_ctr = false` to " + crioDropIn + "/50-crust.conf, and restart CRI-O"
	files, err := crioFiles(n)
	var failed []Finding
	fail := func(file string, err error) {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, warning("see whether it is right, and can be read", "the configuration of CRI-O cannot be read: %s: %v", file, err))
		}
	}
	fail(crioDropIn, err)
	settings := n.effective(files, fail)
	s, said := settings[key("crio.runtime", "drop_infra_ctr")]
	where := show.Either(said, fmt.Sprintf("%s:%d", s.file, s.line), "its default")
	switch {
	case len(failed) > 0:
		return failed
	case len(settings) == 0 && n.Service.InPod:
		return []Finding{skipped("not looked at: CRI-O's configuration on the node cannot be seen from this pod")}
	case !said || s.value:
		return []Finding{failure(do, "CRI-O has drop_infra_ctr = true (%s): its sandboxes have no process, and a container with a deferred "+
			"volume does not start under crust-runc", where)}
	}
	return []Finding{okay("CRI-O gives each sandbox a process (drop_infra_ctr = false, %s)", where)}
}

// crioFiles lists CRI-O's configuration in the order in which it is read: a later file overrides an earlier one. The
// error is that of the directory of drop-ins.
func crioFiles(n Node) ([]string, error) {
	files := []string{crioConfig}
	entries, err := os.ReadDir(n.at(crioDropIn)) // sorted by name
	for _, entry := range entries {
		if !entry.IsDir() && len(files) < 256 {
			files = append(files, path.Join(crioDropIn, entry.Name()))
		}
	}
	return files, err
}
