package conformance

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// runPlain runs a pod without volumes.
func runPlain(t *trial, s *suite) {
	s.check(t, "plain-container", func(t *trial) {
		startsPlain(t, newPod(t, s.node, s.node.podUID()))
	})
}

// startsPlain runs a container with an ordinary bind mount.
func startsPlain(t *trial, p *pod) {
	plain := p.n.path("kubelet", "plain-"+p.sandbox.id)
	t.must(os.MkdirAll(plain, 0o755)) //nolint:gosec // as on a node
	t.must(os.WriteFile(filepath.Join(plain, "file"), []byte("plain"), 0o600))
	c := t.container(p, "plain", bind{source: plain, at: "/data"})
	t.wantText(c, "/data/file", "what it reads from an ordinary mount", "plain")
}

// runVolume mounts one volume in two containers, and checks what the host sees of it.
func runVolume(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var main *container
	s.check(t, "mount-inside", func(t *trial) {
		main = f.container(t, "main")
		seesFilesystem(t, main)
	})
	s.check(t, "mount-grown", func(t *trial) { isLarger(t, main, madeSize) }, "mount-inside")
	s.check(t, "binding-files", func(t *trial) { f.vol.hasBinding(t, f.pod.sandbox.id) }, "mount-inside")
	s.check(t, "binding-program", f.vol.namesProgram, "binding-files")
	s.check(t, "binding-info", f.vol.infoIsWhole, "mount-inside")
	s.check(t, "mount-shared", func(t *trial) { shares(t, f, main) }, "mount-inside")
	s.check(t, "stats-true", func(t *trial) { t.must(f.statsAreTrue(t.ctx, main)) }, "binding-program")
	s.check(t, "stats-sane", f.statsAreSane, "binding-program")
	s.check(t, "cli-unknown", func(t *trial) {
		t.must(f.vol.wantExit(t.ctx, abi.ExitNoSandbox, abi.Stats, f.vol.target+"-other"))
	}, "binding-program")
	s.check(t, "cli-arguments", f.badArguments, "binding-program")
	s.check(t, "socket-same", func(t *trial) { t.must(f.vol.socketAnswers(t.ctx, f.pod.sandbox.id)) }, "stats-sane")
	s.check(t, "socket-codes", func(t *trial) { t.must(f.vol.socketRefuses(t.ctx)) }, "stats-sane")
	s.check(t, "mount-host", func(t *trial) { t.must(errors.Join(s.node.mounts.CheckNone(), f.vol.covered())) }, "mount-inside")
}

// shares fails unless a second container sees the same mount.
func shares(t *trial, f *fixture, main *container) {
	const path = "/data/from-second"
	second := f.container(t, "second")
	t.exec(second, "write", path, "second")
	t.wantText(main, path, "what the first container reads of the second one", "second")
	first := asked[map[string]seen](t, main, "look", path)
	other := asked[map[string]seen](t, second, "look", path)
	t.must(want("the file that the first container sees", first[path], other[path]))
}

// runKeys mounts volumes with more and fewer keys than our broker writes, in one pod.
func runKeys(t *trial, s *suite) {
	uid := s.node.podUID()
	bare := newVolume(t, s.node, newDisk(t, s.node), uid, "bare")
	bare.publishOdd(t, func(info *abi.Info) {
		maps.DeleteFunc(info.Metadata, func(key, _ string) bool { return strings.HasPrefix(key, "crust.") })
	})
	f := newFixture(t, s.node, uid)
	f.vol.publishOdd(t, func(info *abi.Info) { info.Metadata["a-later-key"] = "value" })
	s.check(t, "mount-extra", func(t *trial) { seesFilesystem(t, f.container(t, "extra")) }, "mount-inside")
	s.check(t, "mount-bare", func(t *trial) { seesFilesystem(t, t.container(f.pod, "bare", all(bare))) }, "mount-inside")
}
