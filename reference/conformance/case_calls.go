package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// The times of a freeze: long enough for slow machines, and short enough to wait for.
const (
	longFreeze               = 60 * time.Second
	shortFreeze, leastFreeze = 6 * time.Second, 3 * time.Second // a handler may allow less than the others
	// heldFor is how long a write is observed that must not end.
	heldFor = time.Second
	// lateBy bounds how late the automatic thaw may be.
	lateBy = 20 * time.Second
	// fiThaw is FITHAW of the kernel's linux/fs.h.
	fiThaw = 0xc0045878
)

// runFreeze freezes a volume while a container writes to it.
func runFreeze(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	var held *aside
	s.check(t, "thaw-idle", func(t *trial) {
		c = f.container(t, "main")
		s.node.scratch.add(func(context.Context) error { return forceThaw(c) })
		t.must(f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Thaw, f.vol.target))
	}, "mount-inside", "binding-program")
	s.check(t, "freeze-holds", func(t *trial) {
		freezeVolume(t, f, longFreeze)
		began := time.Now()
		t.exec(c, "usage", "/tmp") // how long it takes to start a probe: a write can only wait after that
		start := 2 * time.Since(began)
		held = startProbe(t.ctx, c, "write", "/data/aside", "x")
		t.must(held.waits(t.ctx, start+heldFor))
	}, "thaw-idle")
	s.check(t, "freeze-stats", func(t *trial) {
		_, err := f.vol.stats(t.ctx)
		t.must(err)
	}, "freeze-holds")
	s.check(t, "freeze-twice", func(t *trial) {
		err := f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Freeze, f.vol.target, "1")
		t.must(errors.Join(err, held.waits(t.ctx, heldFor+time.Second)))
	}, "freeze-holds")
	s.check(t, "freeze-thaw", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitOK, abi.Thaw, f.vol.target))
		t.must(held.ends(t.ctx, lateBy))
	}, "freeze-holds")
	s.check(t, "freeze-auto", func(t *trial) {
		freezeVolume(t, f, shortFreeze)
		late := startProbe(t.ctx, c, "write", "/data/aside", "x")
		err := errors.Join(late.waits(t.ctx, heldFor), late.ends(t.ctx, shortFreeze+lateBy))
		if err != nil {
			// The next requirements must not find the volume frozen.
			_, thawErr := f.vol.ask(t.ctx, abi.Thaw, f.vol.target)
			err = errors.Join(err, thawErr)
		}
		t.must(err)
	}, "freeze-thaw")
	s.check(t, "thaw-late", func(t *trial) { t.must(f.vol.wantExit(t.ctx, abi.ExitWrongState, abi.Thaw, f.vol.target)) }, "freeze-auto")
	s.check(t, "thaw-dead", func(t *trial) { // the sandbox is killed while its volume is frozen
		freezeVolume(t, f, longFreeze)
		t.must(errors.Join(f.pod.sandbox.kill(t.ctx, unix.SIGKILL), c.kill(t.ctx, unix.SIGKILL)))
		// The freeze of a virtual machine has ended with it.
		thawed, err := f.vol.ask(t.ctx, abi.Thaw, f.vol.target)
		t.must(err)
		if thawed.code != abi.ExitWrongState {
			t.must(wantStatus(thawed, abi.ExitOK, []string{abi.Thaw, f.vol.target}))
		}
		t.must(f.disk.waitFree(t.ctx))
	}, "freeze-thaw")
}

// freezeVolume freezes the volume for most, or for as long as the handler allows.
func freezeVolume(t *trial, f *fixture, most time.Duration) {
	words := []string{abi.Freeze, f.vol.target, strconv.Itoa(int(most / time.Second))}
	ended, err := f.vol.ask(t.ctx, words...)
	t.must(err)
	if ended.code == abi.ExitOutOfRange && most > leastFreeze {
		freezeVolume(t, f, max(most/2, leastFreeze))
		return
	}
	t.must(wantStatus(ended, abi.ExitOK, words))
}

// forceThaw undoes a freeze that the handler forgot, if its mount is in this kernel:
// a frozen filesystem cannot be unmounted.
func forceThaw(c *container) error {
	fd, err := unix.Open("/proc/"+c.pid+"/root/data", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil //nolint:nilerr // the container has ended, and with it the mount
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.IoctlSetInt(fd, fiThaw, 0)
	if errors.Is(err, unix.EINVAL) { // it is not frozen
		return nil
	}
	return err
}

func runResize(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var c *container
	s.check(t, "resize-again", func(t *trial) {
		c = f.container(t, "main")
		seesFilesystem(t, c)
		resizesTo(t, f, 0, diskSize)
		resizesTo(t, f, diskSize, diskSize)
	}, "mount-inside", "binding-program", "mount-grown")
	s.check(t, "resize-far", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitOutOfRange, abi.Resize, f.vol.target, strconv.Itoa(diskSize+1), "0"))
	}, "resize-again")
	s.check(t, "resize-limit", func(t *trial) {
		t.must(f.disk.grow()) // the limit is the device's: the filesystem has no more yet
		t.must(f.vol.wantExit(t.ctx, abi.ExitOutOfRange, abi.Resize, f.vol.target, "0", strconv.Itoa(diskSize)))
	}, "resize-again")
	s.check(t, "resize-online", func(t *trial) {
		t.must(f.disk.grow())
		writer := startProbe(t.ctx, c, "churn", "/data/churn")
		resizesTo(t, f, grownSize, grownSize)
		t.must(writer.ends(t.ctx, handlerTimeout))
		isLarger(t, c, diskSize)
		t.wantText(c, "/data/greeting", "a file that was there before", "hello")
	}, "resize-again")
}

// resizesTo fails unless the answer is the size of the device.
func resizesTo(t *trial, f *fixture, least, size int64) {
	reply := &handlerv1.ResizeVolumeResponse{}
	t.must(f.vol.answer(t.ctx, reply, abi.Resize, f.vol.target, strconv.FormatInt(least, 10), "0"))
	t.must(want("the capacity that resize answers", reply.GetCapacityBytes(), size))
}

// aside is the probe while it runs in the background.
type aside struct{ done chan error }

func startProbe(ctx context.Context, c *container, words ...string) *aside {
	a := &aside{done: make(chan error, 1)}
	go func() {
		_, err := c.exec(ctx, words...)
		a.done <- err
	}()
	return a
}

func (a *aside) waits(ctx context.Context, limit time.Duration) error {
	ended, err := a.ended(ctx, limit)
	if ended {
		err = errors.Join(errors.New("a write did not wait while the volume was frozen"), err)
	}
	return err
}

func (a *aside) ends(ctx context.Context, limit time.Duration) error {
	ended, err := a.ended(ctx, limit)
	if !ended && err == nil {
		err = fmt.Errorf("the write still waits after %v, although the volume should not be frozen", limit)
	}
	return err
}

// ended reports whether the probe ends within a time, and how. It may be asked again.
func (a *aside) ended(ctx context.Context, limit time.Duration) (bool, error) {
	select {
	case err := <-a.done:
		a.done <- err
		return true, err
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(limit):
		return false, nil
	}
}

// askTime is what the broker allows a program.
const askTime = 30 * time.Second

// ask runs the handler's program for a volume, as the broker does.
func (v *testVolume) ask(ctx context.Context, words ...string) (programResult, error) {
	program, err := v.line(abi.CLIName)
	if err != nil {
		return programResult{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{abi.Word}, words...)...) //nolint:gosec // the program that is tested
	cmd.Dir, cmd.Env = "/", []string{"LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	return runProgram(ctx, v.n.dir, cmd)
}

func (v *testVolume) wantExit(ctx context.Context, status int, words ...string) error {
	ended, err := v.ask(ctx, words...)
	if err != nil {
		return err
	}
	return wantStatus(ended, status, words)
}

func wantStatus(ended programResult, status int, words []string) error {
	optional := len(words) > 0 && slices.Contains([]string{abi.Resize, abi.Freeze, abi.Thaw}, words[0])
	switch {
	case ended.code == status && (status == abi.ExitOK || ended.stderr != ""):
		return nil
	case ended.code == status:
		return fmt.Errorf("%v ended with status %d, as it should, and says nothing on standard error", words, ended.code)
	case ended.code == abi.ExitUnsupported && optional:
		return unsupported{reason: lastLine(ended.stderr)}
	default:
		return fmt.Errorf("%v ended with status %d and should with %d: %q", words, ended.code, status, lastLine(ended.stderr))
	}
}

// answer reads what the program answers, as the broker does.
func (v *testVolume) answer(ctx context.Context, reply proto.Message, words ...string) error {
	ended, err := v.ask(ctx, words...)
	if err == nil {
		err = wantStatus(ended, abi.ExitOK, words)
	}
	if err != nil {
		return err
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(ended.stdout), reply); err != nil {
		return fmt.Errorf("%v printed %q: %w", words, ended.stdout, err)
	}
	return nil
}

func (v *testVolume) stats(ctx context.Context) (stats, error) {
	reply := &handlerv1.GetVolumeStatsResponse{}
	if err := v.answer(ctx, reply, abi.Stats, v.target); err != nil {
		return stats{}, err
	}
	return statsOf(reply)
}

// servesWithin bounds the wait for the handler to serve the socket that it named.
const servesWithin = 10 * time.Second

// overSocket waits until the handler serves the socket that it offers, and calls f.
func (v *testVolume) overSocket(ctx context.Context, f func(context.Context, handlerv1.HandlerClient) error) error {
	path, err := v.line(abi.SocketName)
	if errors.Is(err, os.ErrNotExist) {
		return unsupported{reason: "it offers no runtime-socket, which is optional"}
	}
	if err != nil {
		return err
	}
	if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("the socket %s has mode %04o and should have 0600", path, info.Mode().Perm())
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	c := handlerv1.NewHandlerClient(conn)
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	err = eventually(ctx, servesWithin, func(ctx context.Context) error {
		_, err := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target})
		if status.Code(err) == codes.Unavailable {
			return fmt.Errorf("nobody serves the socket: %w", err)
		}
		return nil
	})
	if err == nil {
		err = f(ctx, c)
	}
	return errors.Join(err, conn.Close())
}

func wantCode(err error, code codes.Code, what string) error {
	if got := status.Code(err); got != code {
		return fmt.Errorf("%s is answered with %s and should be with %s: %s", what, got, code, status.Convert(err).Message())
	}
	return nil
}

// socketAnswers compares the socket's answers with the program's.
func (v *testVolume) socketAnswers(ctx context.Context, sandbox string) error {
	return v.overSocket(ctx, func(ctx context.Context, c handlerv1.HandlerClient) error {
		seen := func(ctx context.Context) (string, error) {
			program, err := v.stats(ctx)
			return program.String(), err
		}
		return whileStill(ctx, seen, func(ctx context.Context, program string) error {
			reply, err := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target})
			if err != nil {
				return fmt.Errorf("stats by the socket: %w", err)
			}
			got, err := statsOf(reply)
			return errors.Join(err, want("what the socket says", got.String(), program), want("sandbox_id", reply.GetSandboxId(), sandbox))
		})
	})
}

func (v *testVolume) socketRefuses(ctx context.Context) error {
	return v.overSocket(ctx, func(ctx context.Context, c handlerv1.HandlerClient) error {
		_, unknown := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target + "-other"})
		_, relative := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: "mount"})
		_, far := c.ResizeVolume(ctx, &handlerv1.ResizeVolumeRequest{
			TargetPath: v.target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: 1 << 50},
		})
		if status.Code(far) == codes.Unimplemented {
			far = status.Error(codes.OutOfRange, "")
		}
		return errors.Join(
			wantCode(unknown, codes.NotFound, "a volume that no sandbox has"),
			wantCode(relative, codes.InvalidArgument, "a relative target"),
			wantCode(far, codes.OutOfRange, "a size beyond the device"),
		)
	})
}
