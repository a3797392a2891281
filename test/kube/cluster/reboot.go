package cluster

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

const bootID = "/proc/sys/kernel/random/boot_id"

// Reboot plays a reboot of the node, of which nobody is told: all of its processes are
// killed, its mounts, loop devices and /run are gone, and the boot id is another one. What
// a disk would keep is there: kubelet's directories, containerd's store, and the drivers'
// images. What pods have not synced is not lost, for the kernel is the same. The control
// plane and the drivers' sidecars are elsewhere.
func (k *Kube) Reboot() {
	k.T.Helper()
	for _, one := range []*rig.Process{k.Kubelet, k.Proxy, k.Containerd.Process} {
		one.Kill()
	}
	for _, driver := range k.Drivers {
		driver.Process.Kill()
	}
	k.Must(rig.KillAll(func() []int { return rig.BelowGroup(k.group) }))
	k.Must(k.Containerd.PowerOff())
	k.Must(errors.Join(rig.Unmount(KubeletRoot), rig.DetachLoops(k.dataDir("")+"/"), k.bootAgain()))
	k.Must(k.Mend())
}

// bootAgain has the kernel tell another boot id, in this mount namespace.
func (c *Cluster) bootAgain() error {
	file := c.Dir + "/boot-id"
	if err := os.WriteFile(file, []byte(uuid.NewUUID()+"\n"), 0o600); err != nil {
		return err
	}
	if err := unix.Mount(file, bootID, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	c.t.Cleanup(func() { c.check(unix.Unmount(bootID, unix.MNT_DETACH)) })
	return nil
}
