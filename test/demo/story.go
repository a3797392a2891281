package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// The pods that want the volume.
const firstPod, secondPod = "4a5e7c2a-pod-one", "b7d9-pod-two"

// story is the whole way of one volume.
func story(t rig.T) {
	p := newTelling(t)
	p.cast(
		part{isReal, "crust-proxy and crustctl, built from this source"},
		part{isReal, "the CSI driver: crust-driver, which here knows nothing of deferral and attaches loop devices"},
		part{isReal, "the kernel: devices, ext4, mounts, and what it refuses"},
		part{emulated, "kubelet: its directories, and the CSI calls that it makes"},
		part{emulated, "Kata: a process that answers on its shim's socket, with a mount namespace in place of a guest"},
	)
	p.tell(p.register, p.stage, p.guard, p.startPod, p.measure, p.refuseSecondOwner, p.killDaemon, p.unstage, p.verify, p.giveBack)
}

// registerTime is how long the driver may take to be offered to kubelet, which is after the daemon is ready.
const registerTime = 2 * time.Minute

func (p *telling) register(context.Context) {
	p.begin("A CSI driver that knows nothing of this registers. crust-proxy stands between it and kubelet.")
	p.must(p.driver.Process.Launch())
	p.start()
	socket := p.daemon.Kubelet + "/plugins_registry/" + csivolume.DriverName + ".crust-proxy-reg.sock"
	err := check.Until(registerTime, 20*time.Millisecond, func() error { _, err := os.Stat(socket); return err })
	p.check(err == nil, "crust-proxy offers it to kubelet under its own name")
	p.quote(p.crustctl("drivers"))
}

func (p *telling) stage(context.Context) {
	p.begin("A pod wants a new volume with ext4. A rule says that the pod's sandbox is to mount it.")
	p.v = p.driver.Create(p.t, "data", "ext4", diskSize)
	p.v.For(firstPod)
	p.v.Publish()
	p.handedOver()
	p.check(true, "CreateVolume, NodeStageVolume, NodePublishVolume: OK")
	p.check(true, "the driver was asked for a block device; it was blank, and has an ext4 now: %s", p.disk)
	p.quote(p.crustctl("list"))
}

// etc is a directory on which the demo tries to mount the disk.
func (p *telling) etc() string { return p.daemon.Dir + "/etc" }

func (p *telling) guard(context.Context) {
	p.begin("The host has not mounted it, and nothing can be written where it is not.")
	p.check(len(rig.MountsOf(p.disk)) == 0, "no mount of %s on the host", p.disk)
	p.check(p.guards() == 1, "the target holds the guard")
	err := os.WriteFile(p.v.Target+"/data", []byte("data"), 0o600)
	p.check(errors.Is(err, unix.ENOSPC), "a program that a wrong runtime starts there gets: %v", err)
	err = unix.Mount(p.disk, p.etc(), "ext4", 0, "")
	p.check(errors.Is(err, unix.EBUSY), "mounting the device on the host gives: %v", err)
}

func (p *telling) guards() (count int) {
	for _, m := range rig.Mounts(p.daemon.Kubelet) {
		if strings.HasPrefix(m.Source, abi.GuardPrefix) {
			count++
		}
	}
	return count
}

func (p *telling) startPod(context.Context) {
	p.begin("The pod starts. Its sandbox finds the instruction, attaches the device and mounts it.")
	p.sandbox = p.startSandbox("sandbox-one")
	done := write(p.sandbox.Dir())
	p.must(done.err)
	p.checksum = done.sum
	p.check(true, "the workload wrote %d MiB (sha256 %.12s...)", dataSize>>20, p.checksum)
	p.check(len(rig.MountsOf(p.sandbox.Loop)) == 0 && len(rig.MountsOf(p.disk)) == 0, "the host still sees no filesystem")
	busy := unix.Mount(p.disk, p.etc(), "ext4", 0, "")
	p.check(errors.Is(busy, unix.EBUSY), "mounting the device on the host still gives: %v", busy)
}

func (p *telling) measure(context.Context) {
	p.begin("kubelet asks how full it is. The sandbox answers.")
	reply := check.Value(p.v.Stats())(p.t)
	inside := check.Value(df(p.sandbox.Dir()))(p.t)
	bytes := reply.GetUsage()[0]
	outside := fmt.Sprint(bytes.GetTotal(), " ", bytes.GetUsed())
	p.check(outside == inside, "total and used through crust-proxy: %s; df in the sandbox: %s", outside, inside)
	p.quote(p.crustctl("stats", p.v.Target))
}

func (p *telling) refuseSecondOwner(context.Context) {
	p.begin("A second pod wants the same disk.")
	p.quote(status.Convert(p.wantRefused(secondPod)).Message())
}

func (p *telling) killDaemon(context.Context) {
	p.begin("crust-proxy is killed with -9 while the workload writes, and started again.")
	p.killWhileWriting()
	p.start()
	list := p.crustctl("list", "-o", "wide")
	p.check(strings.Contains(list, "BOUND") && strings.Contains(list, "sandbox-one"), "the volume is there, with its sandbox")
	p.quote(list)
	_, err := p.v.Stats()
	p.check(err == nil, "stats: %v", status.Code(err))
	err = p.v.As(secondPod).TryPublish()
	p.check(status.Code(err) == codes.FailedPrecondition, "the second pod is still refused: %v", status.Code(err))
}

// killWhileWriting checks that the write outlived the daemon.
func (p *telling) killWhileWriting() {
	dead, kill := context.WithCancel(context.Background())
	writing := make(chan written, 1)
	go func() { // until it has written once without the daemon
		for last := false; !last; {
			last = dead.Err() != nil
			if done := write(p.sandbox.Dir()); last || done.err != nil {
				writing <- done
				return
			}
		}
	}()
	p.daemon.Kill()
	killed := time.Now()
	kill()
	done := <-writing
	outlived := done.at.Sub(killed)
	p.check(done.err == nil && outlived > 0 && done.sum != p.checksum,
		"the workload wrote on for %v and noticed nothing (sha256 %.12s...)", outlived.Round(time.Millisecond), done.sum)
	p.checksum = done.sum
}

func (p *telling) unstage(context.Context) {
	p.begin("The pod ends.")
	err := p.v.TryUnpublish()
	p.check(status.Code(err) == codes.Aborted, "NodeUnpublishVolume too early, while the sandbox writes: %v", status.Code(err))
	p.must(p.sandbox.Stop())
	err = p.v.TryUnpublish()
	p.check(err == nil, "when the sandbox has ended: %v", status.Code(err))
	p.check(p.guards() == 0, "the guard is gone")
	p.check(isEmpty(p.daemon.Kata), "no metadata is left")
	p.check(isEmpty(p.daemon.Dir+"/run/state/volumes"), "no record is left")
}

func isEmpty(dir string) bool {
	left, err := os.ReadDir(dir)
	return err == nil && len(left) == 0
}

func (p *telling) verify(ctx context.Context) {
	p.begin("Is the data whole?")
	p.fsck(ctx)
	sum, err := peek(p.disk)
	p.check(err == nil && sum == p.checksum, "the checksum of the data is what the workload wrote: %.12s...", sum)
}

func (p *telling) giveBack(context.Context) {
	p.begin("The volume goes back to the driver, and is deleted.")
	p.v.Delete()
	p.check(true, "NodeUnstageVolume, DeleteVolume: OK")
	p.check(len(rig.LoopsLeft(p.driver.Data)) == 0, "the driver has let %s go", p.disk)
	p.check(isEmpty(p.daemon.Dir+"/run/state/csi"), "no record is left of it")
}
