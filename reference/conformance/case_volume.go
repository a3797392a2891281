package conformance

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// runPlain runs a pod without volumes.
func runPlain(ctx context.Context, s *suite) error {
	s.check(ctx, "plain-container", func(ctx context.Context) error {
		p, err := newPod(ctx, s.node, s.node.podUID())
		if err != nil {
			return err
		}
		return p.startsPlain(ctx)
	})
	return nil
}

// startsPlain runs a container with an ordinary bind mount.
func (p *pod) startsPlain(ctx context.Context) error {
	plain := p.n.path("kubelet", "plain-"+p.sandbox.id)
	if err := os.MkdirAll(plain, 0o755); err != nil { //nolint:gosec // as on a node
		return err
	}
	if err := os.WriteFile(filepath.Join(plain, "file"), []byte("plain"), 0o600); err != nil {
		return err
	}
	c, err := p.container(ctx, "plain", bind{source: plain, at: "/data"})
	if err != nil {
		return err
	}
	return c.wantText(ctx, "/data/file", "what it reads from an ordinary mount", "plain")
}

// volumeCase mounts one volume in two containers, and checks what the host sees of it.
type volumeCase struct{ f *fixture }

func runVolume(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &volumeCase{f: f}
	var main *container
	s.check(ctx, "mount-inside", func(ctx context.Context) (err error) {
		if main, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		return seesFilesystem(ctx, main)
	})
	s.check(ctx, "mount-grown", func(ctx context.Context) error { return t.f.isLarger(ctx, main, madeSize) }, "mount-inside")
	s.check(ctx, "binding-files", func(context.Context) error { return t.f.vol.hasBinding(t.f.pod.sandbox.id) }, "mount-inside")
	s.check(ctx, "binding-program", func(context.Context) error { return t.f.vol.namesProgram() }, "binding-files")
	s.check(ctx, "binding-info", func(context.Context) error { return t.f.vol.infoIsWhole() }, "mount-inside")
	s.check(ctx, "mount-shared", func(ctx context.Context) error { return t.shares(ctx, main) }, "mount-inside")
	s.check(ctx, "stats-true", func(ctx context.Context) error { return t.f.statsAreTrue(ctx, main) }, "binding-program")
	s.check(ctx, "stats-sane", func(ctx context.Context) error { return t.f.statsAreSane(ctx) }, "binding-program")
	s.check(ctx, "cli-unknown", func(ctx context.Context) error {
		return t.f.vol.wantExit(ctx, abi.ExitNoSandbox, abi.Stats, t.f.vol.target+"-other")
	}, "binding-program")
	s.check(ctx, "cli-arguments", func(ctx context.Context) error { return t.f.badArguments(ctx) }, "binding-program")
	s.check(ctx, "socket-same", func(ctx context.Context) error {
		return t.f.vol.socketAnswers(ctx, t.f.pod.sandbox.id)
	}, "stats-sane")
	s.check(ctx, "socket-codes", func(ctx context.Context) error { return t.f.vol.socketRefuses(ctx) }, "stats-sane")
	s.check(ctx, "mount-host", func(context.Context) error {
		return errors.Join(s.node.mounts.checkNone(), t.f.vol.covered())
	}, "mount-inside")
	return runLeastKeys(ctx, s)
}

// shares fails unless a second container sees the same mount.
func (t *volumeCase) shares(ctx context.Context, main *container) error {
	second, err := t.f.container(ctx, "second")
	if err != nil {
		return err
	}
	if _, err := second.exec(ctx, "write", "/data/from-second", "second"); err != nil {
		return err
	}
	if err := main.wantText(ctx, "/data/from-second", "what the first container reads of the second one", "second"); err != nil {
		return err
	}
	path := "/data/from-second"
	first, err := ask[map[string]seen](ctx, main, "look", path)
	if err != nil {
		return err
	}
	other, err := ask[map[string]seen](ctx, second, "look", path)
	if err == nil {
		err = want("the file that the first container sees", first[path], other[path])
	}
	return err
}

// runLeastKeys mounts volumes with more and fewer keys than our broker writes.
func runLeastKeys(ctx context.Context, s *suite) error {
	for name, change := range map[string]func(*abi.Info){
		"mount-extra": func(info *abi.Info) { info.Metadata["a-later-key"] = "value" },
		"mount-bare": func(info *abi.Info) {
			for key := range info.Metadata {
				if strings.HasPrefix(key, "cruf.") {
					delete(info.Metadata, key)
				}
			}
		},
	} {
		f, err := newFixture(ctx, s.node, s.node.podUID())
		if err != nil {
			return err
		}
		if err := f.vol.publishOdd(change); err != nil {
			return err
		}
		s.check(ctx, name, func(ctx context.Context) error {
			c, err := f.container(ctx, "main")
			if err != nil {
				return err
			}
			return seesFilesystem(ctx, c)
		}, "mount-inside")
	}
	return nil
}
