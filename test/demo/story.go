package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// play is one showing.
type play struct {
	teller
	*node
	target, other string
	sandbox       *sandbox
	checksum      string
}

// story is the whole way of one volume.
func story(ctx context.Context, n *node) error {
	p := &play{node: n}
	for _, act := range []func(context.Context) error{
		p.stage, p.guard, p.run, p.measure, p.refuseSecondOwner, p.killDaemon, p.unstage, p.verify,
	} {
		if err := ctx.Err(); err != nil {
			return errors.New("interrupted")
		}
		if err := act(ctx); err != nil {
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

func (p *play) request(target string) *runtimev1.RuntimeStageVolumeRequest {
	return &runtimev1.RuntimeStageVolumeRequest{
		VolumeType:       &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK},
		VolumeTargetPath: target, VolumeBackingPath: p.disk, FsType: "ext4",
	}
}

func (p *play) stage(ctx context.Context) error {
	p.begin("A driver has attached %s (ext4). It asks crust-proxy to defer the mount.", p.disk)
	if err := p.start(ctx); err != nil {
		return err
	}
	var err error
	if p.target, err = p.node.target("4a5e7c2a-pod-one"); err != nil {
		return err
	}
	client, err := p.client()
	if err != nil {
		return err
	}
	_, err = client.RuntimeStageVolume(ctx, p.request(p.target))
	p.check(err == nil, "RuntimeStageVolume: %v", status.Code(err))
	p.quote(p.crustctl("list"))
	return err
}

func (p *play) guard(context.Context) error {
	p.begin("The host has not mounted it, and nothing can be written where it is not.")
	p.check(len(mounts(" ext4 "+p.disk+" ")) == 0, "no mount of %s on the host", p.disk)
	p.check(len(mounts("crust:")) == 1, "the target holds the guard")
	err := os.WriteFile(p.target+"/data", []byte("data"), 0o600)
	p.check(errors.Is(err, unix.ENOSPC), "a program that a wrong runtime starts there gets: %v", err)
	err = unix.Mount(p.disk, p.dir+"/etc", "ext4", 0, "")
	p.check(errors.Is(err, unix.EBUSY), "mounting the device on the host gives: %v", err)
	return nil
}

func (p *play) run(ctx context.Context) (err error) {
	p.begin("The pod starts. Its sandbox finds the instruction, attaches the device and mounts it.")
	if p.sandbox, err = p.startSandbox(ctx, "sandbox-one", p.target); err != nil {
		return err
	}
	p.checksum, err = p.sandbox.do("write")
	p.check(err == nil, "the workload wrote %d MiB (sha256 %.12s...)", dataSize>>20, p.checksum)
	p.check(len(mounts(" ext4 "+p.sandbox.loop+" ")) == 0, "the host still sees no filesystem")
	return err
}

func (p *play) measure(ctx context.Context) error {
	p.begin("kubelet asks how full it is. The sandbox answers.")
	client, err := p.client()
	if err != nil {
		return err
	}
	reply, err := client.RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: p.target})
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
	client, err := p.client()
	if err != nil {
		return err
	}
	_, refusal := client.RuntimeStageVolume(ctx, p.request(p.other))
	p.check(status.Code(refusal) == codes.FailedPrecondition, "it is refused: %v", status.Code(refusal))
	p.quote(status.Convert(refusal).Message())
	return nil
}

func (p *play) killDaemon(ctx context.Context) (err error) {
	p.begin("crust-proxy is killed with -9 while the workload writes, and started again.")
	p.kill()
	p.checksum, err = p.sandbox.do("write")
	p.check(err == nil, "the workload noticed nothing (sha256 %.12s...)", p.checksum)
	if err := p.start(ctx); err != nil {
		return err
	}
	list := p.crustctl("list")
	p.check(strings.Contains(strings.ToLower(list), "bound"), "the volume is there, with its sandbox")
	p.quote(list)
	client, err := p.client()
	if err != nil {
		return err
	}
	_, err = client.RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: p.target})
	p.check(err == nil, "stats: %v", status.Code(err))
	_, err = client.RuntimeStageVolume(ctx, p.request(p.other))
	p.check(status.Code(err) == codes.FailedPrecondition, "the second pod is still refused: %v", status.Code(err))
	return nil
}

func (p *play) unstage(ctx context.Context) error {
	p.begin("The pod ends, and the volume is given back.")
	client, err := p.client()
	if err != nil {
		return err
	}
	request := &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: p.target}
	_, err = client.RuntimeUnstageVolume(ctx, request)
	p.check(status.Code(err) == codes.Aborted, "too early, while the sandbox writes: %v", status.Code(err))
	if err := p.sandbox.stop(); err != nil {
		return err
	}
	_, err = client.RuntimeUnstageVolume(ctx, request)
	p.check(err == nil, "when the sandbox has ended: %v", status.Code(err))
	p.check(len(mounts("crust:")) == 0, "the guard is gone")
	left, err := os.ReadDir(p.dir + "/kata")
	p.check(err == nil && len(left) == 0, "no metadata is left")
	records, err := os.ReadDir(p.dir + "/run/state/volumes")
	p.check(err == nil && len(records) == 0, "no record is left")
	return nil
}

func (p *play) verify(ctx context.Context) error {
	p.begin("Is the data whole?")
	out, err := exec.CommandContext(ctx, "fsck.ext4", "-fn", p.disk).CombinedOutput() //nolint:gosec // our own device
	p.check(err == nil, "fsck finds nothing: %s", lastLine(string(out)))
	cmd, err := again(ctx, rolePeek, p.disk, p.dir+"/etc")
	if err != nil {
		return err
	}
	sum, err := cmd.Output()
	p.check(err == nil && string(sum) == p.checksum, "the checksum of the data is what the workload wrote: %.12s...", sum)
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
