package driver

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func compareOf(base, target io.ReaderAt) *comparison {
	return &comparison{base: base, target: target, free: newBuffers()}
}

// unknowns is the layout of an image of which nothing is known.
func unknowns(size int64) layout {
	return fakeExtents(size, 1, extent{Length: uint64(size), Flags: extentEncoded})
}

// all compares images of which nothing is known.
func (c *comparison) all(ctx context.Context, w walk) error {
	return c.run(ctx, w, unknowns(w.to), unknowns(w.to))
}

// TestComparison compares images of random changes with a plain loop.
func TestComparison(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const size = 3*compareStep + 5*block + 77
	for range 50 {
		base, target := make([]byte, size), make([]byte, size)
		for range random.IntN(20) {
			target[random.IntN(size)] = 1
		}
		from := random.Int64N(size)
		var want, got []span
		for at := from; at < size; {
			end := min((at/block+1)*block, size)
			if !bytes.Equal(base[at:end], target[at:end]) {
				want = append(want, span{at, end})
			}
			at = end
		}
		check.Must(t, compareOf(bytes.NewReader(base), bytes.NewReader(target)).all(t.Context(), collect(from, size, &got)))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("from %d, -want +got:\n%s", from, diff)
		}
	}
}

func TestComparisonOfAShortImage(t *testing.T) {
	var got []span
	short := compareOf(bytes.NewReader(make([]byte, block)), bytes.NewReader(make([]byte, 2*block)))
	if err := short.all(t.Context(), collect(0, 2*block, &got)); !errors.Is(err, io.EOF) || len(got) > 0 {
		t.Error(err, got)
	}
}

// imageFunc is an image that is made as it is read.
type imageFunc func(into []byte, at int64) (int, error)

func (f imageFunc) ReadAt(into []byte, at int64) (int, error) { return f(into, at) }

// TestComparisonIsParallel: as many reads as there are buffers wait for each other, and
// the later ones end first. What is reported ascends all the same.
func TestComparisonIsParallel(t *testing.T) {
	const size = 8 * comparedAtOnce * compareStep
	turns := make([]chan struct{}, size/compareStep)
	for n := range turns {
		turns[n] = make(chan struct{})
	}
	var reading, most atomic.Int64
	target := imageFunc(func(into []byte, at int64) (int, error) {
		most.Store(max(most.Load(), reading.Add(1)))
		defer reading.Add(-1)
		n := int(at / compareStep)
		if n%comparedAtOnce < comparedAtOnce-1 {
			select {
			case <-turns[n+1]:
			case <-time.After(20 * time.Second):
				return 0, errors.New("the next step is not read at the same time")
			}
		}
		close(turns[n])
		into[0] = 1
		return len(into), nil
	})
	var got []span
	check.Must(t, compareOf(zeroImage(), target).all(t.Context(), collect(0, size, &got)))
	for n, one := range got {
		if one != (span{int64(n) * compareStep, int64(n)*compareStep + block}) {
			t.Fatalf("range %d is %v", n, one)
		}
	}
	if len(got) != len(turns) || most.Load() > comparedAtOnce {
		t.Errorf("%d ranges, %d reads at once", len(got), most.Load())
	}
}

func zeroImage() imageFunc {
	return func(into []byte, _ int64) (int, error) { clear(into); return len(into), nil }
}

// TestComparisonWaitsForItsClient: who does not read a stream has little of the images
// read, and holds none of the buffers.
func TestComparisonWaitsForItsClient(t *testing.T) {
	const size = int64(1) << 40
	var reads atomic.Int64
	compare := compareOf(zeroImage(), imageFunc(func(into []byte, _ int64) (int, error) {
		reads.Add(1)
		into[0] = 1
		return len(into), nil
	}))
	gone := errors.New("the client has gone")
	w := collect(0, size, new([]span))
	w.report = func(int64, int64) error {
		check.Eventually(t, "no more is read", func() bool { return reads.Load() >= knownAhead && len(compare.free) == comparedAtOnce })
		return gone
	}
	if err := compare.all(t.Context(), w); !errors.Is(err, gone) {
		t.Error(err)
	}
	if n := reads.Load(); n > knownAhead+comparedAtOnce+1 || len(compare.free) != comparedAtOnce {
		t.Errorf("%d steps were read, %d buffers are free", n, len(compare.free))
	}
}

// TestComparisonEndsWithItsCaller, also while all buffers are in use elsewhere.
func TestComparisonEndsWithItsCaller(t *testing.T) {
	compare := compareOf(zeroImage(), zeroImage())
	for range comparedAtOnce {
		<-compare.free
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := compare.all(ctx, collect(0, 1<<40, new([]span))); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// TestHolesAreNotRead, on either side.
func TestHolesAreNotRead(t *testing.T) {
	unread := imageFunc(func([]byte, int64) (int, error) { return 0, errors.New("a hole is read") })
	data := make([]byte, 8*block)
	data[5*block] = 1
	hole := func() layout { return fakeExtents(8*block, 1) }
	for name, c := range map[string]struct {
		compare       *comparison
		before, after layout
	}{
		"before": {compareOf(unread, bytes.NewReader(data)), hole(), unknowns(8 * block)},
		"after":  {compareOf(bytes.NewReader(data), unread), unknowns(8 * block), hole()},
	} {
		var got []span
		err := c.compare.run(t.Context(), collect(0, 8*block, &got), c.before, c.after)
		if diff := cmp.Diff([]span{{5 * block, 6 * block}}, got); err != nil || diff != "" {
			t.Errorf("%s: %v, -want +got:\n%s", name, err, diff)
		}
	}
	var got []span
	check.Must(t, compareOf(unread, unread).run(t.Context(), collect(0, 1<<50, &got), fakeExtents(1<<50, 1), fakeExtents(1<<50, 1)))
}
