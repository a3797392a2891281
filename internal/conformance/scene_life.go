package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// life kills containers and sandboxes.
func (s *suite) life(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var c *container
	s.check(ctx, "life-container", func(ctx context.Context) (err error) {
		if c, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		if err := s.seesFilesystem(ctx, c); err != nil {
			return err
		}
		if err := errors.Join(c.kill(ctx, unix.SIGKILL), c.remove(ctx)); err != nil {
			return err
		}
		if _, err := st.vol.stats(ctx); err != nil {
			return fmt.Errorf("when the pod's only container had ended: %w", err)
		}
		c, err = st.pod.container(ctx, "main", all(st.vol))
		if err != nil {
			return err
		}
		_, err = c.exec(ctx, "read", "/data/greeting")
		return err
	}, "mount-inside", "binding-program")
	var notes map[string][]byte
	s.check(ctx, "life-free", func(ctx context.Context) (err error) {
		if notes, err = st.vol.handlerFiles(); err != nil {
			return err
		}
		// The sandbox first, as when a node's memory is short.
		if err := errors.Join(st.pod.sandbox.kill(ctx, unix.SIGKILL), c.kill(ctx, unix.SIGKILL)); err != nil {
			return err
		}
		return eventually(ctx, endsWithin, func(context.Context) error { return st.disk.free() })
	}, "life-container")
	s.check(ctx, "life-answer", func(ctx context.Context) error {
		if err := st.vol.putBack(notes); err != nil {
			return err
		}
		return st.vol.wantExit(ctx, abi.ExitNoSandbox, abi.Stats, st.vol.target)
	}, "life-free", "binding-program")
	s.check(ctx, "life-again", func(ctx context.Context) (err error) {
		if st.pod, err = s.node.newPod(ctx, st.vol.owner); err != nil {
			return err
		}
		if c, err = st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		text, err := c.exec(ctx, "read", "/data/greeting")
		if err != nil {
			return err
		}
		return want("a file from before", text, "hello")
	}, "life-free")
	s.check(ctx, "life-newest", func(ctx context.Context) error { return st.newestAnswers(ctx, notes) }, "life-again", "life-answer", "binding-program")
	return nil
}

// handlerFiles are what the handler left.
func (v *volume) handlerFiles() (map[string][]byte, error) {
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	for _, entry := range entries {
		if entry.Name() == abi.InfoName {
			continue
		}
		if files[entry.Name()], err = os.ReadFile(filepath.Join(v.dir, entry.Name())); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// putBack has files be there again that the handler may have removed, as it may.
func (v *volume) putBack(files map[string][]byte) error {
	dir, err := v.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	err = dir.Lock(time.Second)
	for name, content := range files {
		if _, statErr := os.Lstat(filepath.Join(v.dir, name)); statErr == nil {
			continue
		}
		err = errors.Join(err, dir.Put(name, content))
	}
	return errors.Join(err, dir.Unlock())
}

// newestAnswers asks while the dead sandbox's file is there, too.
func (st *stage) newestAnswers(ctx context.Context, dead map[string][]byte) error {
	if err := st.vol.putBack(dead); err != nil {
		return err
	}
	if err := st.statsAreSane(ctx); err != nil {
		return err
	}
	var no cannot
	err := st.vol.socketAnswers(ctx, st.pod.sandbox.id)
	if errors.As(err, &no) {
		return nil
	}
	return err
}
