package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// plain is a pod that has nothing to do with volumes.
func (s *suite) plain(ctx context.Context) error {
	s.check(ctx, "plain-container", func(ctx context.Context) error {
		p, err := s.node.newPod(ctx, s.node.podUID())
		if err != nil {
			return err
		}
		return p.startsPlain(ctx)
	})
	return nil
}

// startsPlain runs a container with a mount that is none of the handler's.
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
	text, err := c.exec(ctx, "read", "/data/file")
	if err != nil {
		return err
	}
	return want("what it reads from an ordinary mount", text, "plain")
}

// volume is one volume with two containers, and what is left of it on the host.
func (s *suite) volume(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var main *container
	s.check(ctx, "mount-inside", func(ctx context.Context) (err error) {
		if main, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		return s.seesFilesystem(ctx, main)
	})
	s.check(ctx, "mount-grown", func(ctx context.Context) error { return st.isLarger(ctx, main, madeSize) }, "mount-inside")
	s.check(ctx, "binding-files", func(context.Context) error { return st.vol.hasBinding(st.pod.sandbox.id) }, "mount-inside")
	s.check(ctx, "binding-program", func(context.Context) error { return st.vol.namesProgram() }, "binding-files")
	s.check(ctx, "binding-info", func(context.Context) error { return st.vol.infoIsWhole() }, "mount-inside")
	s.check(ctx, "mount-shared", func(ctx context.Context) error { return st.shares(ctx, main) }, "mount-inside")
	s.check(ctx, "stats-true", func(ctx context.Context) error { return st.statsAreTrue(ctx, main) }, "binding-program")
	s.check(ctx, "stats-sane", func(ctx context.Context) error { return st.statsAreSane(ctx) }, "binding-program")
	s.check(ctx, "cli-unknown", func(ctx context.Context) error {
		return st.vol.wantExit(ctx, abi.ExitNoSandbox, abi.Stats, st.vol.target+"-other")
	}, "binding-program")
	s.check(ctx, "cli-arguments", func(ctx context.Context) error { return st.badArguments(ctx) }, "binding-program")
	s.check(ctx, "socket-same", func(ctx context.Context) error {
		return st.vol.socketAnswers(ctx, st.pod.sandbox.id)
	}, "stats-sane")
	s.check(ctx, "socket-codes", func(ctx context.Context) error { return st.vol.socketRefuses(ctx) }, "stats-sane")
	s.check(ctx, "mount-host", func(context.Context) error {
		return errors.Join(s.node.host.none(), st.vol.covered())
	}, "mount-inside")
	return s.leastKeys(ctx)
}

// seesFilesystem fails where the container sees another filesystem, or cannot use it.
func (s *suite) seesFilesystem(ctx context.Context, c *container) error {
	magic := map[string]int64{"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC, "btrfs": unix.BTRFS_SUPER_MAGIC}
	use, err := ask[seenUsage](ctx, c, "usage", "/data")
	if err != nil {
		return err
	}
	if use.Type == unix.TMPFS_MAGIC {
		return errors.New("the container sees the guard")
	}
	if use.Type != magic[s.opts.FSType] {
		return fmt.Errorf("the container sees another filesystem (magic %#x) than the volume's %s", use.Type, s.opts.FSType)
	}
	if _, err := c.exec(ctx, "write", "/data/greeting", "hello"); err != nil {
		return err
	}
	text, err := c.exec(ctx, "read", "/data/greeting")
	if err != nil {
		return err
	}
	return want("what was written", text, "hello")
}

// isLarger fails where the filesystem still has its old size.
func (st *stage) isLarger(ctx context.Context, c *container, than int64) error {
	use, err := ask[seenUsage](ctx, c, "usage", "/data")
	if err != nil {
		return err
	}
	if total := int64(use.Blocks) * use.Unit; total <= than { //nolint:gosec // a small disk
		return fmt.Errorf("the filesystem has %d bytes, as before; its device is larger", total)
	}
	return nil
}

// hasBinding looks at what the handler left in the volume's directory.
func (v *volume) hasBinding(sandbox string) error {
	dir, err := v.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err != nil {
		return err
	}
	if !slices.Equal(ids, []string{sandbox}) {
		return fmt.Errorf("the files named by sandboxes are %q and should be %q alone", ids, sandbox)
	}
	if _, err := dir.Line(abi.CLIName); err != nil {
		return err
	}
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if known := []string{sandbox, abi.InfoName, abi.CLIName, abi.SocketName}; !slices.Contains(known, entry.Name()) {
			return fmt.Errorf("there is a file %q, which has no meaning", entry.Name())
		}
	}
	return nil
}

func (v *volume) namesProgram() error {
	dir, err := v.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	program, err := dir.Line(abi.CLIName)
	if err != nil {
		return err
	}
	return checkProgram(program)
}

func (v *volume) infoIsWhole() error {
	wanted, err := abi.Encode(&v.said)
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(v.dir, abi.InfoName))
	if err == nil && !bytes.Equal(raw, wanted) {
		err = fmt.Errorf("%s was changed", abi.InfoName)
	}
	return err
}

// shares runs a second container, which sees the same mount.
func (st *stage) shares(ctx context.Context, main *container) error {
	second, err := st.pod.container(ctx, "second", all(st.vol))
	if err != nil {
		return err
	}
	if _, err := second.exec(ctx, "write", "/data/from-second", "second"); err != nil {
		return err
	}
	text, err := main.exec(ctx, "read", "/data/from-second")
	if err != nil {
		return err
	}
	if err := want("what the first container reads of the second one", text, "second"); err != nil {
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

// leastKeys mounts what other brokers, and later ones, would write.
func (s *suite) leastKeys(ctx context.Context) error {
	for name, change := range map[string]func(*abi.Info){
		"mount-extra": func(info *abi.Info) { info.Metadata["a-later-key"] = "value" },
		"mount-bare": func(info *abi.Info) {
			for key := range info.Metadata {
				if strings.HasPrefix(key, "crust.") {
					delete(info.Metadata, key)
				}
			}
		},
	} {
		st, err := s.set(ctx)
		if err != nil {
			return err
		}
		if err := st.vol.publishOdd(change); err != nil {
			return err
		}
		s.check(ctx, name, func(ctx context.Context) error {
			c, err := st.pod.container(ctx, "main", all(st.vol))
			if err != nil {
				return err
			}
			return s.seesFilesystem(ctx, c)
		}, "mount-inside")
	}
	return nil
}
