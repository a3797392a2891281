package cluster

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// SnapshotClass is the VolumeSnapshotClass of a driver's snapshots.
func SnapshotClass(driver string) string { return "snapshots." + driver }

// DelayedClass is the StorageClass of volumes that the sidecars of a driver make where the first pod is, and remove
// with their claims. They have an xfs, which any root may grow.
func DelayedClass(driver string) string { return "delayed." + driver }

// StartSidecars runs the real csi-provisioner, csi-resizer and csi-snapshotter of drivers, as the chart runs them and
// with its rights, and the cluster's snapshot-controller with upstream's, until the test has ended. Volumes of
// NewVolume are not for such a test: two would answer to the same claim.
func (k *Kube) StartSidecars(drivers ...string) {
	k.T.Helper()
	programs, err := sidecars()
	k.Must(err)
	k.Must(check.Err(k.Kubectl("apply", "--server-side", "--kustomize", programs+"/crd")))
	k.Must(check.Err(k.Kubectl("wait", "--for=condition=established", "--timeout="+Patience.String(), "customresourcedefinitions", "--all")))
	for _, driver := range drivers {
		if !k.elsewhere() {
			k.giveReflinks(driver)
		}
		k.Must(k.Apply(classes(driver)))
	}
	d := &deployment{k: k, programs: programs}
	k.T.Cleanup(d.end)
	d.layOut(drivers)
	k.Must(k.mendSidecars())
	if k.elsewhere() {
		k.T.Cleanup(d.keep())
	}
}

// keep starts sidecars again that have ended, as kubelet does: connections to a node that is elsewhere, and slow, are lost
// at times.
func (d *deployment) keep() (stop func()) {
	ended, running := make(chan struct{}), sync.WaitGroup{}
	running.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(time.Second):
				_ = d.k.mendSidecars() // it is tried again
			}
		}
	})
	return func() { close(ended); running.Wait() }
}

// mendSidecars starts those that do not run: each ends when it has lost its driver.
func (c *Cluster) mendSidecars() error {
	c.mending.Lock()
	defer c.mending.Unlock()
	for _, p := range c.sidecars {
		if p.Alive() {
			continue
		}
		if err := p.Launch(); err != nil {
			return err
		}
	}
	return nil
}

// giveReflinks has a driver keep its images on an xfs: only there can they be cloned while
// they are in use. It has no volumes now.
func (k *Kube) giveReflinks(driver string) {
	k.T.Helper()
	disk, process := rig.Disk(k.T, 8<<30, "xfs"), k.Drivers[driver].Process
	k.Must(process.Stop())
	k.T.Cleanup(func() {
		k.check(errors.Join(process.Stop(), rig.Unmount(k.dataDir(driver)), process.Start()))
	})
	k.Must(unix.Mount(disk, k.dataDir(driver), "xfs", 0, ""))
	k.Must(process.Start())
}

// classes are what an administrator makes for a driver with sidecars.
func classes(driver string) string {
	return fmt.Sprintf(`apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %[2]s}
provisioner: %[1]s
reclaimPolicy: Delete
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
parameters: {csi.storage.k8s.io/fstype: xfs}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: %[3]s}
driver: %[1]s
deletionPolicy: Delete
---
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: %[3]s}
driver: %[1]s
deletionPolicy: Delete
`, driver, DelayedClass(driver), SnapshotClass(driver))
}

// Snapshot makes a VolumeSnapshot of a claim, of the same driver, and waits until it can be used.
func (k *Kube) Snapshot(name string, of *Volume) {
	k.T.Helper()
	single.take(k, name, fmt.Sprintf(`apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: %s, namespace: %s}
spec:
  volumeSnapshotClassName: %s
  source: {persistentVolumeClaimName: %s}
`, name, Namespace, SnapshotClass(of.Driver), of.Name))
}

// SnapshotGroup makes a VolumeGroupSnapshot of the claims with a label, and waits until it
// can be used. It goes with the test, and with it its snapshots.
func (k *Kube) SnapshotGroup(name, driver, label string) {
	k.T.Helper()
	key, value, _ := strings.Cut(label, "=")
	grouped.take(k, name, fmt.Sprintf(`apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshot
metadata: {name: %s, namespace: %s}
spec:
  volumeGroupSnapshotClassName: %s
  source: {selector: {matchLabels: {%s: %s}}}
`, name, Namespace, SnapshotClass(driver), key, value))
}

// snapshotKind is a kind of snapshots, and the field of their status that names what the driver has.
type snapshotKind struct{ name, contentField string }

var (
	single  = snapshotKind{"volumesnapshot", "boundVolumeSnapshotContentName"}
	grouped = snapshotKind{"volumegroupsnapshot", "boundVolumeGroupSnapshotContentName"}
)

func (s snapshotKind) take(k *Kube, name, manifest string) {
	k.T.Helper()
	k.Must(k.Apply(manifest))
	k.T.Cleanup(func() { k.check(s.remove(k, name)) })
	k.Must(check.Err(k.Kubectl("wait", "--for=jsonpath={.status.readyToUse}=true", "--timeout="+Patience.String(), s.name+"/"+name)))
}

func (s snapshotKind) remove(k *Kube, name string) error {
	content, err := k.Kubectl("get", "--ignore-not-found", "--output=jsonpath={.status."+s.contentField+"}", s.name+"/"+name)
	if err != nil || content == "" {
		return err
	}
	if _, err := k.Kubectl("delete", "--ignore-not-found", "--timeout="+Patience.String(), s.name+"/"+name); err != nil {
		return err
	}
	_, err = k.Kubectl("wait", "--for=delete", "--timeout="+Patience.String(), s.name+"content/"+strings.TrimSpace(content))
	return err
}
