package pods

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

const floodingPods = 12

// flood has pods that name claims which do not exist, and one older pod that a stage is about.
func flood(t *testing.T) (*fakeAPI, *Cluster) {
	f := newFakeAPI(t, "data")
	for n := range floodingPods {
		names := numbered("none", 256)
		for i := range names {
			names[i] = fmt.Sprintf("p%d-%s", n, names[i])
		}
		f.put(aPod(fmt.Sprintf("flood-%d", n), names...))
	}
	c := startSynced(t, f, patient)
	return f, c
}

func (f *fakeAPI) claimsAsked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum := 0
	for what, n := range f.asked {
		if strings.HasPrefix(what, "get persistentvolumeclaims") {
			sum += n
		}
	}
	return sum
}

// TestPodsWithClaimsThatDoNotExist: a tenant's pods that name thousands of them do not
// hold up another pod's stage, and cost the API server a few requests each.
func TestPodsWithClaimsThatDoNotExist(t *testing.T) {
	f, c := flood(t)
	older := aPod("older", "data")
	older.CreationTimestamp.Time = born.Add(-time.Hour)
	f.put(older)
	for range 8 { // kubelet repeats what is refused
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, _ = c.Using(ctx, driver, "vol-of-nobody")
		cancel()
		users := usersOf(t, c, "vol-data")
		check.Require(t, slices.Equal(users, []string{"older"}), "using: %v", users)
	}
	// Each try of a pod ends after a few claims, and each of these is asked for less and less often.
	n := f.claimsAsked()
	check.That(t, n <= floodingPods*64, "%d claims were asked for, of %d that do not exist", n, floodingPods*256)
}

// TestNobodyIsAskedForACallerWhoHasGone, and no more than a few claims at a time.
func TestNobodyIsAskedForACallerWhoHasGone(t *testing.T) {
	f := newFakeAPI(t)
	c := startSynced(t, f, patient)
	release := f.holdGets("persistentvolumeclaims")
	defer release()
	for n := range floodingPods {
		f.put(aPod(fmt.Sprintf("flood-%d", n), fmt.Sprintf("none-%d-a", n), fmt.Sprintf("none-%d-b", n)))
	}
	eventually(t, c, "the pods are known", func() bool { return c.State().Pods == floodingPods })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	_, _ = c.Using(ctx, driver, "vol-of-nobody")
	cancel()
	n := 0 // once it is the limit, none comes until the first get has used up its time
	eventually(t, c, "as many as may be are asked for", func() bool { n = f.claimsAsked(); return n >= getsAtOnce })
	check.That(t, n == getsAtOnce, "%d claims are asked for at a time", n)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	one, _ := c.pods.find("uid-flood-0")
	failed := c.resolver.learn(gone, one)
	check.That(t, len(failed) == 0 && f.claimsAsked() <= n, "for a caller who has gone %d claims were asked for: %v", f.claimsAsked()-n, failed)
}
