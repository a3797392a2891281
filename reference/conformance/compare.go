package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// settles bounds the wait for a filesystem's background writes. The calls of a slow machine
// take their time beside it.
const settles = time.Minute

// statsAreTrue compares the stats with statfs in the container.
func (f *fixture) statsAreTrue(ctx context.Context, c *container) error {
	reply, err := f.vol.stats(ctx)
	if err != nil {
		return err
	}
	if reply.Condition != nil && reply.Condition.Abnormal {
		return fmt.Errorf("a whole volume is said to be abnormal: %q", reply.Condition.Message)
	}
	seen := func(ctx context.Context) (seenUsage, error) { return ask[seenUsage](ctx, c, "usage", "/data") }
	return whileStill(ctx, seen, func(ctx context.Context, use seenUsage) error {
		reply, err := f.vol.stats(ctx)
		if err == nil && !slices.Equal(reply.Usage, use.usages()) {
			err = fmt.Errorf("it answers %+v, and statfs in the sandbox gives %+v", reply.Usage, use.usages())
		}
		return err
	})
}

// whileStill repeats compare until it succeeds, or fails three times with the same state
// before and after it: filesystems write in the background.
func whileStill[T comparable](ctx context.Context, see func(context.Context) (T, error), compare func(context.Context, T) error) error {
	var last error
	began := time.Now()
	for tries := 0; tries < 3 && time.Since(began) < settles; {
		before, err := see(ctx)
		if err != nil {
			return errors.Join(last, err)
		}
		last = compare(ctx, before)
		after, err := see(ctx)
		if last == nil || err != nil {
			return err
		}
		if before == after {
			tries++
		}
	}
	return last
}

// usages are the stats that the handler should give.
func (u seenUsage) usages() []abi.Usage {
	size := func(blocks uint64) int64 { return int64(blocks) * u.Unit } //nolint:gosec // a small disk
	all := []abi.Usage{{Unit: abi.UnitBytes, Total: size(u.Blocks), Used: size(u.Blocks - u.Free), Available: size(u.Avail)}}
	if u.Files > 0 {
		//nolint:gosec // a small disk
		all = append(all, abi.Usage{Unit: abi.UnitInodes, Total: int64(u.Files), Used: int64(u.Files - u.FFree), Available: int64(u.FFree)})
	}
	return all
}

func (f *fixture) statsAreSane(t *trial) {
	reply, err := f.vol.stats(t.ctx)
	t.must(err)
	if len(reply.Usage) == 0 {
		t.must(errors.New("it answers without any usage"))
	}
	for _, u := range reply.Usage {
		if u.Total <= 0 || u.Used < 0 || u.Available < 0 || u.Used > u.Total || u.Available > u.Total {
			t.must(fmt.Errorf("it answers %+v, which cannot be", u))
		}
		if u.Unit == abi.UnitBytes && u.Total > diskSize {
			t.must(fmt.Errorf("it answers %+v, of a device of %d bytes", u, diskSize))
		}
	}
}

// badArguments calls the program with invalid arguments.
func (f *fixture) badArguments(t *trial) {
	target := f.vol.target
	for _, words := range [][]string{
		{}, {abi.Stats}, {abi.Stats, "mount"}, {abi.Stats, target, "more"}, {abi.Resize, target}, {abi.Resize, target, "1", "many"},
		{abi.Resize, target, "-1", "0"}, {abi.Freeze, target}, {abi.Freeze, target, "soon"}, {"no-such-word", target},
	} {
		t.must(f.vol.wantExit(t.ctx, abi.ExitUsage, words...))
	}
}
