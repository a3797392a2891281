package main

import (
	"context"
	"os"
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

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
	cmd, err := again(rolePeek, p.disk, p.dir+"/etc")
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
