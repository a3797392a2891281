package doctor

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"time"
)

const containerdWait = 2 * time.Second

// checkContainerd: runtime-rs writes no sandbox id, so its sandboxes are found
// by containerd's labels.
func checkContainerd(ctx context.Context, n Node, _ Daemon) []Finding {
	if n.ContainerdSocket == "" {
		return []Finding{okay("containerd is not used by this daemon's configuration")}
	}
	ctx, cancel := context.WithTimeout(ctx, containerdWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", n.at(n.ContainerdSocket))
	switch {
	case err == nil:
		_ = conn.Close() // nothing was sent
		return []Finding{okay("containerd answers on %s", n.ContainerdSocket)}
	case errors.Is(err, fs.ErrPermission):
		return []Finding{okay("containerd's socket %s was not tried (run as root)", n.ContainerdSocket)}
	}
	return []Finding{warning("systemctl status containerd; where its socket is another one, set it in crust-proxy's configuration and give crustctl doctor --containerd-socket",
		"containerd cannot be reached on %s: sandboxes of Kata's Rust runtime are not found (%v)", n.ContainerdSocket, errors.Unwrap(err))}
}
