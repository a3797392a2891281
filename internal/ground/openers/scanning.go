package openers

import (
	"context"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers/scan"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// scanning finds openers without the kernel's count: it asks about each kind of opener in turn.
type scanning struct {
	processes *scan.Scanner
	layers    func(file File, fd int) ([]File, error)
}

func (s *scanning) look(ctx context.Context, q Query, file File) (found, error) {
	free, known := countsAsFree(file, q.Own)
	if known && free && len(q.Stack) == 0 {
		return found{}, nil
	}
	if file.Block && !q.Claimed {
		if err := tryExclusive(q.FD, file); errors.Is(err, unix.EBUSY) {
			return named(Users{Names: KernelUsers(file), Kernel: true}), nil
		} else if err != nil {
			return found{}, err
		}
	}
	layers, err := s.layers(file, q.FD)
	if err != nil {
		return found{}, err
	}
	images := slices.DeleteFunc(slices.Clone(q.Stack), func(f File) bool { return f.Block })
	have, err := s.processes.Find(ctx, q.Servers, slices.Concat(layers, images)...)
	if err != nil {
		return found{}, err
	}
	if len(have) > 0 {
		return named(Users{Names: strings.Join(namesOf(have), ", ")}), nil
	}
	loop, err := s.loopOver(ctx, layers, &q)
	switch {
	case err != nil:
		return found{}, err
	case loop != "":
		return named(Users{Names: loop, Kernel: true}), nil
	case known && !free:
		return s.unseen(ctx, file, layers)
	}
	return found{}, nil
}

func (s *scanning) holders(ctx context.Context, q *Query, file File) ([]Holder, error) {
	layers, err := s.layers(file, q.FD)
	if err != nil {
		return nil, err
	}
	return s.processes.Find(ctx, q.Servers, layers...)
}

// loopOver names a loop device over the layers of a device, or over the rest of its stack, that somebody
// uses; of an image that is handed over itself, any.
func (s *scanning) loopOver(ctx context.Context, layers []File, q *Query) (name string, err error) {
	err = eachLoop(slices.Concat(q.Beside, layers), func(loop File) (more bool, err error) {
		under, err := s.layers(loop, sys.NoFD)
		if err != nil && mayLieOn(loop, slices.Concat(layers, q.Stack)) {
			return false, err
		}
		if err != nil || !slices.ContainsFunc(under[1:], func(f File) bool { return slices.Contains(layers, f) || slices.Contains(q.Stack, f) }) {
			return true, nil // an unknown device of others stops no volume
		}
		by, err := s.usersOf(ctx, loop)
		if err == nil && (by != "" || !layers[0].Block || slices.Contains(q.Expected, loop)) {
			name = "this node's kernel: the loop device " + NodeOf(loop) + " lies on it, or on the same data" + by
		}
		return name == "", err
	})
	return name, err
}

// usersOf says who uses a loop device; "" is nobody.
func (s *scanning) usersOf(ctx context.Context, loop File) (string, error) {
	fd, err := unix.Open(NodeOf(loop), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_EXCL, 0)
	sys.CloseAlone(fd)
	if errors.Is(err, unix.EBUSY) {
		return ", and is mounted or claimed", nil
	}
	if err != nil && !IsNoDevice(err) {
		return "", err
	}
	have, err := s.processes.Find(ctx, nil, loop)
	if err != nil || len(have) == 0 {
		return "", err
	}
	return ", and is open in " + strings.Join(namesOf(have), ", "), nil
}

// unseen answers for a device of device mapper that is open more often than by the caller, although
// nobody was found: a mapping has it open, for example. The servers may be the reason.
func (s *scanning) unseen(ctx context.Context, file File, layers []File) (found, error) {
	if servers, err := s.processes.Find(ctx, nil, layers...); err != nil || len(servers) > 0 {
		return found{}, err
	}
	return named(Users{Names: KernelUsers(file), Kernel: true}), nil
}

func named(users Users) found { return found{count: 1, users: func() Users { return users }} }

// tryExclusive fails with EBUSY if the kernel has a block device in use, or another program claims it.
func tryExclusive(fd int, file File) error {
	claim, err := unix.Open(sys.ProcFD(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_EXCL, 0)
	sys.CloseFD(claim)
	if IsGone(file, err) {
		return nil
	}
	return err
}
