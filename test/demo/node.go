package main

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

const diskSize = 128 << 20

// telling is one showing, on the demo's node: the daemon, and the CSI driver behind it.
type telling struct {
	teller
	daemon   *rig.Daemon
	driver   *csivolume.Driver // its registrar looks for crust-proxy where it would look for kubelet
	sandbox  *kata.Guest
	checksum string
}

// built is the directory with the programs that `make build` made; if there are none, the
// demo builds them.
func built() string {
	if bin, err := filepath.Abs("bin"); err == nil {
		if _, err := os.Stat(bin + "/crust-driver"); err == nil {
			return bin
		}
	}
	return ""
}

func newTelling(t rig.T) *telling {
	n := &telling{teller: teller{t: t}, daemon: rig.NewDaemon(t)}
	n.daemon.Programs = built()
	n.driver = csivolume.New(n.daemon, "policy: {rules: [{name: pods-in-sandboxes, drivers: ["+csivolume.DriverName+"], defer: true}]}")
	n.must(os.Mkdir(n.daemon.Dir+"/etc", 0o750))
	return n
}

// start starts the daemon and waits until the driver answers through it.
func (n *telling) start() {
	n.daemon.Start()
	n.driver.Wait(n.t)
}

// crustctl runs the operator's tool.
func (n *telling) crustctl(args ...string) string {
	out, err := n.daemon.Crustctl(args...).CombinedOutput()
	if err != nil {
		return string(out) + err.Error()
	}
	return string(out)
}

// startSandbox starts what does as Kata's shim and guest do.
func (n *telling) startSandbox(id string) *kata.Guest {
	s, err := kata.Boot(id, n.daemon.Kata, n.daemon.GoSandboxes, n.v.Target)
	n.must(err)
	n.t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			n.t.Error(err)
		}
	})
	return s
}

// handedOver reads which device the sandbox will find.
func (n *telling) handedOver() {
	var err error
	n.disk, _, err = kata.HandedOver(n.daemon.Kata, n.v.Target)
	n.must(err)
	if _, attached := n.loops()[n.disk]; !attached {
		n.t.Fatalf("%s is no loop device over an image of the driver", n.disk)
	}
}

// loops are the loop devices over images of the driver.
func (n *telling) loops() map[string]string { return rig.Loops(n.driver.Data + "/") }
