//go:build system

package cluster

import (
	"errors"
	"os"

	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// Containerd is the node's container runtime, with the handlers runc and crust.
type Containerd struct {
	node    *cri.Node
	stopped bool
}

// network is a CNI configuration without which a node is not ready. No plugin is
// ever run: all pods use the node's network.
const cniConfig = `{"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}`

// newContainerd starts one. Close the node also after an error.
func newContainerd(crustRunc string) (*Containerd, error) {
	programs, err := containerd2()
	if err != nil {
		return &Containerd{}, err
	}
	node, err := cri.New(cri.Options{Programs: programs, Handlers: map[string]string{Crust: crustRunc}})
	if err != nil {
		return &Containerd{node: node}, err
	}
	err = os.MkdirAll(node.Dir+"/cni", 0o700)
	return &Containerd{node: node}, errors.Join(err, os.WriteFile(node.Dir+"/cni/10-none.conflist", []byte(cniConfig), 0o600))
}

// Start starts it again, and waits until it serves.
func (c *Containerd) Start() error { c.stopped = false; return c.node.Launch() }

// Kill kills it with SIGKILL; shims and pods live on.
func (c *Containerd) Kill() { c.stopped = true; c.node.Kill() }

// Stop asks it to end; shims and pods live on.
func (c *Containerd) Stop() error { c.stopped = true; return c.node.Stop() }

// Restart stops it, as an upgrade does, and starts it again.
func (c *Containerd) Restart() error { return errors.Join(c.Stop(), c.Start()) }

// Alive tells whether it was started and not stopped.
func (c *Containerd) Alive() bool { return c.node != nil && !c.stopped }

// Log is the end of what it has logged.
func (c *Containerd) Log() string {
	if c.node == nil {
		return ""
	}
	return c.node.Log()
}

// Socket is containerd's.
func (c *Containerd) Socket() string { return c.node.Socket }
