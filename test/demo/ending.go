package main

import (
	"context"
	"os"
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func (p *play) unstage(ctx context.Context) error {
	p.begin("The pod ends.")
	err := p.unpublish(ctx, p.target)
	p.check(status.Code(err) == codes.Aborted, "NodeUnpublishVolume too early, while the sandbox writes: %v", status.Code(err))
	if err := p.sandbox.stop(); err != nil {
		return err
	}
	err = p.unpublish(ctx, p.target)
	p.check(err == nil, "when the sandbox has ended: %v", status.Code(err))
	p.check(len(rig.MountLines("crust:")) == 0, "the guard is gone")
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

func (p *play) giveBack(ctx context.Context) error {
	p.begin("The volume goes back to the driver, and is deleted.")
	err := p.remove(ctx)
	p.check(err == nil, "NodeUnstageVolume, DeleteVolume: %v", status.Code(err))
	p.check(len(p.loops()) == 0, "the driver has let %s go", p.disk)
	records, err := os.ReadDir(p.dir + "/run/state/csi")
	p.check(err == nil && len(records) == 0, "no record is left of it")
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
