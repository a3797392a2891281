package doctor

import (
	"context"
	"errors"
	"io/fs"
	"time"
)

const containerdWait = 2 * time.Second

// checkContainerd: runtime-rs writes no sandbox id, so its sandboxes are found
// by containerd's labels.
func checkContainerd(ctx context.Context, n Node, _ Daemon) []Finding {
	if n.ContainerdSocket == "" {
		return []Finding{okay("containerd is not used by this daemon's configuration")}
	}
	return checkAnswers(ctx, n, "containerd", n.ContainerdSocket,
		"systemctl status containerd; where its socket is another one, set it in crust-proxy's configuration and give crustctl doctor --containerd-socket")
}

// checkCRI is the same where sandboxes are asked for through the CRI.
func checkCRI(ctx context.Context, n Node, _ Daemon) []Finding {
	if n.CRISocket == "" {
		return []Finding{okay("the CRI is not used by this daemon's configuration")}
	}
	return checkAnswers(ctx, n, "the container runtime", n.CRISocket,
		"see whether the container runtime runs (systemctl status crio); where its socket is another one, set cri.socket in crust-proxy's configuration")
}

// checkAnswers connects to the program from which the daemon learns of sandboxes.
func checkAnswers(ctx context.Context, n Node, who, socket, do string) []Finding {
	err := n.dial(ctx, socket, containerdWait)
	switch {
	case err == nil:
		return []Finding{okay("%s answers on %s", who, socket)}
	case errors.Is(err, fs.ErrPermission):
		return []Finding{okay("%s's socket %s was not tried (run as root)", who, socket)}
	}
	return []Finding{warning(do, "%s cannot be reached on %s: sandboxes of Kata's Rust runtime are not found (%v)", who, socket, errors.Unwrap(err))}
}
