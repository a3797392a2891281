package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// play is one showing.
type play struct {
	teller
	*node
	volume        volume
	target, other string
	sandbox       *sandbox
	checksum      string
}

var errInterrupted = errors.New("interrupted")

// story is the whole way of one volume.
func story(ctx context.Context, n *node) error {
	p := &play{node: n}
	for _, act := range []func(context.Context) error{
		p.register, p.stage, p.guard, p.startPod, p.measure, p.refuseSecondOwner, p.killDaemon, p.unstage, p.verify, p.giveBack,
	} {
		if err := ctx.Err(); err != nil {
			return errInterrupted
		}
		err := act(ctx)
		if ctx.Err() != nil {
			return errInterrupted
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", p.step, err)
		}
	}
	fmt.Println()
	if p.failed > 0 {
		return fmt.Errorf("%d checks failed", p.failed)
	}
	fmt.Printf("%sEverything shown was checked, and was true.%s\n", bold+green, plain)
	return nil
}

func (p *play) register(ctx context.Context) error {
	p.begin("A CSI driver that knows nothing of this registers. crust-proxy stands between it and kubelet.")
	if err := p.startDriver(); err != nil {
		return err
	}
	if err := p.start(ctx); err != nil {
		return err
	}
	_, err := os.Stat(p.dir + "/kubelet/plugins_registry/" + driverName + ".crust-proxy-reg.sock")
	p.check(err == nil, "crust-proxy offers it to kubelet under its own name")
	p.quote(p.crustctl("drivers"))
	return nil
}

func (p *play) stage(ctx context.Context) (err error) {
	p.begin("A pod wants a new volume with ext4. A rule says that the pod's sandbox is to mount it.")
	if p.target, err = p.node.target("4a5e7c2a-pod-one"); err != nil {
		return err
	}
	if err := p.create(ctx); err != nil {
		return err
	}
	if err := p.publish(ctx, p.target); err != nil {
		return err
	}
	if err := p.handedOver(p.target); err != nil {
		return err
	}
	p.check(true, "CreateVolume, NodeStageVolume, NodePublishVolume: OK")
	p.check(true, "the driver was asked for a block device; it was blank, and has an ext4 now: %s", p.disk)
	p.quote(p.crustctl("list"))
	return nil
}

func (p *play) guard(context.Context) error {
	p.begin("The host has not mounted it, and nothing can be written where it is not.")
	p.check(len(rig.MountLines(" ext4 "+p.disk+" ")) == 0, "no mount of %s on the host", p.disk)
	p.check(len(rig.MountLines("crust:")) == 1, "the target holds the guard")
	err := os.WriteFile(p.target+"/data", []byte("data"), 0o600)
	p.check(errors.Is(err, unix.ENOSPC), "a program that a wrong runtime starts there gets: %v", err)
	err = unix.Mount(p.disk, p.dir+"/etc", "ext4", 0, "")
	p.check(errors.Is(err, unix.EBUSY), "mounting the device on the host gives: %v", err)
	return nil
}

func (p *play) startPod(context.Context) (err error) {
	p.begin("The pod starts. Its sandbox finds the instruction, attaches the device and mounts it.")
	if p.sandbox, err = p.startSandbox("sandbox-one", p.target); err != nil {
		return err
	}
	answer, err := p.sandbox.do("write")
	p.checksum, _, _ = strings.Cut(answer, " ")
	p.check(err == nil, "the workload wrote %d MiB (sha256 %.12s...)", dataSize>>20, p.checksum)
	p.check(len(rig.MountLines(" ext4 "+p.sandbox.loop+" ")) == 0 && len(rig.MountLines(" ext4 "+p.disk+" ")) == 0, "the host still sees no filesystem")
	busy := unix.Mount(p.disk, p.dir+"/etc", "ext4", 0, "")
	p.check(errors.Is(busy, unix.EBUSY), "mounting the device on the host still gives: %v", busy)
	return err
}

func (p *play) stats(ctx context.Context) (*csi.NodeGetVolumeStatsResponse, error) {
	return p.csi().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: p.volume.id, VolumePath: p.target})
}

func (p *play) measure(ctx context.Context) error {
	p.begin("kubelet asks how full it is. The sandbox answers.")
	reply, err := p.stats(ctx)
	if err != nil {
		return err
	}
	inside, err := p.sandbox.do("df")
	if err != nil {
		return err
	}
	bytes := reply.GetUsage()[0]
	outside := fmt.Sprint(bytes.GetTotal(), " ", bytes.GetUsed())
	p.check(outside == inside, "total and used through crust-proxy: %s; df in the sandbox: %s", outside, inside)
	p.quote(p.crustctl("stats", p.target))
	return nil
}

func (p *play) refuseSecondOwner(ctx context.Context) (err error) {
	p.begin("A second pod wants the same disk.")
	if p.other, err = p.node.target("b7d9-pod-two"); err != nil {
		return err
	}
	refusal := p.publish(ctx, p.other)
	p.check(status.Code(refusal) == codes.FailedPrecondition, "it is refused: %v", status.Code(refusal))
	p.quote(status.Convert(refusal).Message())
	return nil
}

func (p *play) killDaemon(ctx context.Context) (err error) {
	p.begin("crust-proxy is killed with -9 while the workload writes, and started again.")
	if err := p.killWhileWriting(); err != nil {
		return err
	}
	if err := p.start(ctx); err != nil {
		return err
	}
	list := p.crustctl("list")
	p.check(strings.Contains(list, "BOUND") && strings.Contains(list, "sandbox-one"), "the volume is there, with its sandbox")
	p.quote(list)
	_, err = p.stats(ctx)
	p.check(err == nil, "stats: %v", status.Code(err))
	err = p.publish(ctx, p.other)
	p.check(status.Code(err) == codes.FailedPrecondition, "the second pod is still refused: %v", status.Code(err))
	return nil
}

// killWhileWriting checks that the write outlived the daemon.
func (p *play) killWhileWriting() error {
	if err := p.sandbox.send("write"); err != nil {
		return err
	}
	p.kill()
	killed := time.Now()
	answer, err := p.sandbox.answer()
	if err != nil {
		return err
	}
	sum, at, _ := strings.Cut(answer, " ")
	nanos, err := strconv.ParseInt(at, 10, 64)
	outlived := time.Unix(0, nanos).Sub(killed)
	p.check(err == nil && outlived > 0 && sum != p.checksum,
		"the workload wrote on for %v and noticed nothing (sha256 %.12s...)", outlived.Round(time.Millisecond), sum)
	p.checksum = sum
	return err
}
