package conformance

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// runReadOnly makes one mount read-only, and then the whole volume.
func runReadOnly(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var writer, reader, recursive, c *container
	s.check(t, "ro-mount", func(t *trial) {
		writer = f.container(t, "writer")
		reader = t.container(f.pod, "reader", bind{source: f.vol.target, at: "/data", mode: "ro"})
		seesFilesystem(t, writer)
		reads(t, reader, "greeting", "hello")
	}, "mount-inside")
	s.check(t, "ro-recursive", func(t *trial) {
		recursive = t.container(f.pod, "recursive", bind{source: f.vol.target, at: "/data", mode: "rro"})
		reads(t, recursive, "greeting", "hello")
	}, "ro-mount")
	s.check(t, "ro-volume", func(t *trial) {
		f.restartPod(t, writer, reader, recursive)
		t.must(f.disk.setReadOnly(true))
		f.vol.published.ReadOnly, f.vol.published.Group = true, strconv.Itoa(podGroup)
		t.must(f.vol.publish())
		c = f.container(t, "main")
		reads(t, c, "greeting", "hello")
	}, "ro-recursive")
	s.check(t, "ro-group", func(t *trial) {
		for path, is := range asked[map[string]seen](t, c, "look", "/data", "/data/greeting") {
			t.that(is.GID != podGroup, "%s of the read-only volume is %v", path, is)
		}
	}, "ro-volume")
	s.check(t, "ro-sub", func(t *trial) { f.refusesSub(t, "missing") }, "ro-volume")
}

// reads fails unless the container can read the file and cannot write to it.
func reads(t *trial, c *container, name, content string) {
	t.wantText(c, "/data/"+name, "what it reads", content)
	_, err := c.exec(t.ctx, "write", "/data/"+name, "more")
	t.that(err != nil, "the container can write where it may only read")
}

// runUsers asks for what a pod with a user namespace needs. It fails if a container is created
// whose mount has other owners than its mappings ask for.
func runUsers(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	s.check(t, "users-mapped", func(t *trial) {
		const root = 200000
		mapped := all(f.vol)
		mapped.owners = []specs.LinuxIDMapping{{ContainerID: 0, HostID: root, Size: 65536}}
		c := newContainer(s.node, "mapped")
		if c.startsUnlessRefused(t, f.pod.containerSpec("mapped", []bind{mapped})) {
			is := asked[map[string]seen](t, c, "look", "/data")["/data"]
			t.that(is.UID == root && is.GID == root, "the volume's root is %v, and should belong to %d", is, root)
		}
	}, "mount-inside")
}

const podGroup = 4242

// runGroup publishes a volume with an fsGroup, under both policies.
func runGroup(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	canary := s.node.path("canary")
	t.must(os.WriteFile(canary, nil, 0o600))
	var c *container
	s.check(t, "group-always", func(t *trial) {
		c = f.container(t, "main")
		t.exec(c, "tree", "/data")
		t.exec(c, "link", "/data/"+linkFile, canary)
		t.exec(c, "fix", "/data/"+fixedFile)
		c = inGroup(t, f, volume.GroupAlways, c)
		looks(t, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, GID: podGroup},
			directory: {Mode: unix.S_IFDIR | 0o2770, GID: podGroup}, innerFile: {Mode: unix.S_IFREG | 0o664, GID: podGroup},
		})
	}, "mount-inside")
	s.check(t, "group-setid", func(t *trial) {
		looks(t, c, map[string]seen{setIDFile: {Mode: unix.S_IFREG | 0o4775, GID: podGroup}})
	}, "group-always")
	s.check(t, "group-link", func(t *trial) {
		var st unix.Stat_t
		t.must(unix.Stat(canary, &st))
		t.that(st.Gid != podGroup, "the handler followed a link in the volume to %s of the host, and changed its group", canary)
		looks(t, c, map[string]seen{linkFile: {Mode: unix.S_IFLNK | 0o777, GID: podGroup}})
	}, "group-always")
	s.check(t, "group-fixed", func(t *trial) { looks(t, c, map[string]seen{fixedFile: {Mode: unix.S_IFREG | 0o600}}) }, "group-always")
	s.check(t, "group-match", func(t *trial) {
		t.exec(c, "own", "/data/"+plainFile, "7", "8", "600")
		c = inGroup(t, f, volume.GroupOnMismatch, c)
		looks(t, c, map[string]seen{plainFile: {Mode: unix.S_IFREG | 0o600, UID: 7, GID: 8}})
	}, "group-always")
	s.check(t, "group-mismatch", func(t *trial) {
		t.exec(c, "own", "/data", "0", strconv.Itoa(podGroup), "0755")
		c = inGroup(t, f, volume.GroupOnMismatch, c)
		looks(t, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, UID: 7, GID: podGroup},
		})
	}, "group-match")
}

func inGroup(t *trial, f *fixture, policy volume.GroupPolicy, before *container) *container {
	f.restartPod(t, before)
	f.vol.published.Group, f.vol.published.GroupPolicy = strconv.Itoa(podGroup), policy
	t.must(f.vol.publish())
	return f.container(t, "main")
}

func looks(t *trial, c *container, wanted map[string]seen) {
	for name, file := range wanted {
		path := "/data"
		if name != "" {
			path += "/" + name
		}
		is := asked[map[string]seen](t, c, "look", path)[path]
		is.Dev, is.Ino = 0, 0
		t.must(want(path, is, file))
	}
}

// runRefuse publishes volumes that no container may get.
func runRefuse(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	other := newPod(t, s.node, s.node.podUID())
	for _, one := range []struct {
		name   string
		change func(*abi.Info)
	}{
		{"refuse-pod", func(info *abi.Info) { info.Metadata["crust.podUID"] = "00000000-0000-4000-8000-000000000000" }},
		{"refuse-device", func(info *abi.Info) { info.Metadata["crust.device"] = "1:1" }},
		{"refuse-target", func(info *abi.Info) { info.Metadata["crust.targetPath"] += "-other" }},
		{"refuse-type", func(info *abi.Info) { info.VolumeType = "a-later-type" }},
	} {
		f.vol.publishOdd(t, one.change)
		s.check(t, one.name, f.refuses)
	}
	s.check(t, "refuse-option", func(t *trial) {
		for _, option := range []string{"no-such-option=1", "bind", "loop", "rshared"} {
			f.vol.publishOdd(t, func(info *abi.Info) { info.Options = []string{option} })
			err := try(t.ctx, f.refuses)
			t.that(err == nil, "the option %q: %w", option, err)
		}
	})
	t.must(f.vol.publishRaw([]byte(`{"volume-type":"block","device":`)))
	s.check(t, "refuse-broken", f.refuses)
	s.check(t, "refuse-others", func(t *trial) { startsPlain(t, f.pod) }, "plain-container")
	t.must(f.vol.publish())
	s.check(t, "refuse-alone", func(t *trial) { refusesAlone(t, f) })
	s.check(t, "refuse-sandbox", func(t *trial) { refusesSandboxes(t, f, other) })
	s.check(t, "refuse-clean", func(t *trial) {
		dir, err := f.vol.open()
		t.must(err)
		defer func() { _ = dir.Close() }()
		ids, err := dir.Sandboxes()
		t.that(err != nil || len(ids) == 0, "there are files named by sandboxes: %q", ids)
		t.must(errors.Join(err, f.disk.free(), s.node.mounts.CheckNone()))
	})
	t.must(os.RemoveAll(f.vol.dir)) // the guard stays
	s.check(t, "refuse-unpublished", f.refuses)
	t.must(f.vol.publish())
	second := newVolume(t, s.node, f.disk, other.uid, "pv") // of the same device
	s.check(t, "refuse-second", func(t *trial) {
		f.container(t, "main")
		other.refuses(t, all(second))
	}, "mount-inside")
}

// refusesAlone asks for a container without a sandbox, and for a sandbox that mounts the volume itself.
func refusesAlone(t *trial, f *fixture) {
	spec := f.pod.containerSpec("alone", []bind{all(f.vol)})
	spec.Annotations = nil
	newContainer(f.pod.n, "alone").isRefused(t, spec)
	self := &pod{n: f.pod.n, uid: f.pod.uid, sandbox: newContainer(f.pod.n, "sandbox")}
	spec = self.sandboxSpec()
	spec.Mounts = append(spec.Mounts, all(f.vol).mount())
	self.sandbox.isRefused(t, spec)
}

// refusesSandboxes asks for containers whose annotations name a wrong sandbox, or two.
func refusesSandboxes(t *trial, f *fixture, other *pod) {
	plain := t.container(f.pod, "plain")
	for what, note := range map[string][2]string{
		"another pod's sandbox":           {"io.kubernetes.cri.sandbox-id", other.sandbox.id},
		"a container in place of one":     {"io.kubernetes.cri.sandbox-id", plain.id},
		"the annotations of two runtimes": {"io.kubernetes.cri-o.SandboxID", f.pod.sandbox.id},
	} {
		spec := f.pod.containerSpec("refused", []bind{all(f.vol)})
		spec.Annotations[note[0]] = note[1]
		err := try(t.ctx, func(t *trial) { newContainer(f.pod.n, "refused").isRefused(t, spec) })
		t.that(err == nil, "%s: %w", what, err)
	}
}

func runSub(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var main *container
	s.check(t, "sub-bound", func(t *trial) {
		main = plantSubs(t, f)
		shows(t, f, f.vol.bindSub(t, "logs"), "logs")
	}, "mount-inside")
	s.check(t, "sub-names", func(t *trial) { shows(t, f, f.vol.bindSub(t, oddName), oddName) }, "sub-bound")
	s.check(t, "sub-path", func(t *trial) {
		t.must(os.MkdirAll(filepath.Join(f.vol.target, "logs"), 0o750))
		shows(t, f, filepath.Join(f.vol.target, "logs"), "logs")
	}, "sub-bound")
	s.check(t, "sub-made", func(t *trial) {
		c := t.container(f.pod, "sub", bind{source: f.vol.bindSub(t, "new/deep"), at: "/data"})
		t.exec(c, "write", "/data/here", "new")
		t.wantText(main, "/data/new/deep/here", "what was written into the new sub-directory", "new")
		for path, is := range asked[map[string]seen](t, main, "look", "/data/new", "/data/new/deep") {
			t.that(is.UID == 0 && is.Mode&0o7777 == 0o751, "%s was made %v and should be root's with mode 751", path, is)
		}
	}, "sub-bound")
	s.check(t, "sub-link", func(t *trial) {
		f.refusesSub(t, "out")
		f.refusesSub(t, "out/proc")
	}, "sub-bound")
	s.check(t, "sub-file", func(t *trial) { f.refusesSub(t, "plain-file") }, "sub-bound")
	s.check(t, "sub-race", func(t *trial) { racesSub(t, f, main) }, "sub-bound")
	s.check(t, "sub-deleted", func(t *trial) {
		place := f.vol.bindSub(t, "short-lived")
		t.must(unix.Rmdir(filepath.Join(f.vol.target, "short-lived")))
		f.pod.refuses(t, bind{source: place, at: "/data"})
	}, "sub-bound")
}

// oddName has characters that mountinfo escapes.
const oddName = "a b\\c\td"

// plantSubs fills the volume from a container that has all of it.
func plantSubs(t *trial, f *fixture) *container {
	main := f.container(t, "main")
	for _, words := range [][]string{
		{"own", "/data", "0", "0", "0751"},
		{"mkdir", "/data/logs"},
		{"write", "/data/logs/here", "logs"},
		{"mkdir", "/data/" + oddName},
		{"write", "/data/" + oddName + "/here", oddName},
		{"link", "/data/out", "../../../.."},
		{"write", "/data/plain-file", "file"},
	} {
		t.exec(main, words...)
	}
	return main
}

// shows fails unless a container that mounts source sees only the sub-directory.
func shows(t *trial, f *fixture, source, content string) {
	c := t.container(f.pod, "sub", bind{source: source, at: "/data"})
	found := asked[[]string](t, c, "names", "/data")
	t.that(slices.Equal(found, []string{"here"}), "the container sees %q in the sub-directory and should see \"here\" alone", found)
	t.wantText(c, "/data/here", "what is in the sub-directory", content)
}

// racesSub mounts a directory while the workload swaps it for a link.
func racesSub(t *trial, f *fixture, main *container) {
	t.exec(main, "mkdir", "/data/swapped")
	t.exec(main, "write", "/data/swapped/here", "inside")
	place := f.vol.bindSub(t, "swapped")
	swapper := startProbe(t.ctx, main, "swap", "/data/swapped")
	err := try(t.ctx, func(t *trial) {
		for end := time.Now().Add(swapTime); time.Now().Before(end); {
			showsInside(t, f, place)
		}
	})
	t.must(errors.Join(err, swapper.ends(t.ctx, handlerTimeout)))
}

// showsInside fails if a container sees something outside of the volume.
func showsInside(t *trial, f *fixture, place string) {
	c := newContainer(f.pod.n, "race")
	if c.startsUnlessRefused(t, f.pod.containerSpec("race", []bind{{source: place, at: "/data"}})) {
		found := asked[[]string](t, c, "names", "/data")
		t.that(slices.Equal(found, []string{"here"}), "the container sees %q, which is not in the directory", found)
	}
}
