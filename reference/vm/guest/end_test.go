package guest

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// sandboxOf is a sandbox with containers, each of which has a volume of its name.
func sandboxOf(names ...string) *sandbox {
	s := &sandbox{volumes: newVolumes(), containers: &containers{byID: make(map[string]*container)}}
	s.containers.volumes = s.volumes
	for _, name := range names {
		vol := new(guestVolume)
		vol.users.Store(1)
		s.volumes.byName[name] = vol
		s.containers.byID[name] = &container{cgroup: cgroup("crust-vm-no-such-" + name), mountNS: -1, volumes: []*guestVolume{vol}}
	}
	return s
}

// TestDeviceThatHangsAtTheEnd: the volumes of other devices are unmounted.
func TestDeviceThatHangsAtTheEnd(t *testing.T) {
	s := sandboxOf("a", "b", "c", "d")
	s.containers.byID["a"].mu.Lock() // its process cannot be killed
	defer s.containers.byID["a"].mu.Unlock()
	unmounted := make(chan string, 4)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan []string, 1)
	go func() {
		got <- slices.Sorted(slices.Values([]string{<-unmounted, <-unmounted}))
		cancel()
	}()
	failed := s.endAll(ctx, func(ctx context.Context, name string) error {
		if name == "b" {
			select {} // its sync hangs
		}
		err := retry(ctx, errState, func() error {
			if s.volumes.byName[name].users.Load() > 0 {
				return errState
			}
			return nil
		})
		if err == nil {
			unmounted <- name
		}
		return err
	})
	slices.Sort(failed)
	check.That(t, len(failed) > 1 && slices.Contains(failed, "container a: it does not end") && slices.Contains(failed, "volume b: it does not end"), "failed: %q", failed)
	first := <-got
	check.That(t, slices.Equal(first, []string{"c", "d"}) && len(unmounted) == 0, "unmounted: %q", first)
}

// TestAgentThatEnds: init syncs all volumes at once before it turns the machine off.
func TestAgentThatEnds(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b"} {
		check.Must(t, os.Mkdir(dir+"/"+name, 0o700))
	}
	synctest.Test(t, func(t *testing.T) {
		synced, hangs := make(chan string, 2), make(chan struct{})
		began := time.Now()
		syncAll(dir, func(name string) error {
			if name == "a" {
				<-hangs
			}
			synced <- name
			return nil
		})
		check.That(t, time.Since(began) == syncTime && len(synced) == 1 && <-synced == "b", "after %v, %d were synced", time.Since(began), len(synced))
		close(hangs)
	})
}

// TestSlowDiskIsWaitedFor, and one that does nothing any more is not.
func TestSlowDiskIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const busy = 4 * time.Minute
		began := time.Now()
		ctx, cancel := whileBusy(t.Context(), func() string { // one request in 20 s
			return strconv.Itoa(int(min(time.Since(began), busy) / (20 * time.Second)))
		})
		defer cancel()
		<-ctx.Done()
		took := time.Since(began)
		check.That(t, took >= busy+stallTime && took < busy+stallTime+5*time.Second, "it ended after %v", took)
	})
}

// TestContainerThatIsRemovedWhileItIsCreated is no user of its volumes any more.
func TestContainerThatIsRemovedWhileItIsCreated(t *testing.T) {
	s := sandboxOf("a")
	cs, vol := s.containers, s.volumes.byName["a"]
	s.volumes.mu.Lock() // it waits for its volumes
	created := check.Begin(func() error {
		return check.Err(cs.CreateContainer(t.Context(), &wire.CreateContainerRequest{
			Container: "new", Spec: []byte(`{"process":{},"root":{},"mounts":[{},{}]}`), Volumes: []*wire.VolumeMount{{Volume: "a"}, {Volume: "gone", Mount: 1}},
		}))
	})
	check.Eventually(t, "it is known", func() bool { return cs.all()["new"] != nil })
	removed := check.Begin(func() error { return cs.remove(t.Context(), "new") })
	time.Sleep(100 * time.Millisecond) // until that has found it
	s.volumes.mu.Unlock()
	check.That(t, errors.Is(<-created, errNotFound), "a container whose volume is gone was created")
	check.Must(t, <-removed)
	check.Equal(t, vol.users.Load(), 1, "users of the volume")
}

// TestVolumeThatIsUnmounted is not the directory on which it was mounted, which is there for a moment.
func TestVolumeThatIsUnmounted(t *testing.T) {
	v, dir := newVolumes(), check.Value(os.MkdirTemp("/dev/shm", ""))(t)
	defer func() { _ = os.Remove(dir) }()
	name := "../../.." + dir
	v.byName[name] = new(guestVolume)
	check.Is(t, check.Err(v.GetVolumeStats(t.Context(), &wire.GetVolumeStatsRequest{Volume: name})), errNotFound)
	check.Is(t, check.Err((&volumeMount{Path: dir}).open()), errNotFound)
	check.Must(t, unix.Close(check.Value(openMounted("/proc"))(t)))
}
