package openers

import (
	"context"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/openers/scan"
	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// scanning finds openers without the kernel's count: it asks about each kind of opener in turn.
type scanning struct{ processes *scan.Scanner }

func newScanning(sockets []string) *scanning {
	return &scanning{scan.New(sockets...)}
}

func (s *scanning) look(ctx context.Context, q Query, file File) (found, error) {
	free, known := countsAsFree(file, q.Own)
	if known && free && len(q.Stack) == 0 {
		return found{}, nil
	}
	if file.Block && !q.Claimed {
		if err := tryExclusive(q.FD); errors.Is(err, unix.EBUSY) {
			return named(Users{Names: KernelUsers(file), Kernel: true}), nil
		} else if err != nil {
			return found{}, err
		}
	}
	layers, err := Layers(file)
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
	loop, err := loopOver(layers, q)
	if err != nil || loop != "" || !known || free {
		return foundLoop(loop), err
	}
	return s.unseen(ctx, file, layers)
}

// loopOver finds a loop device over the layers of a device, or over the rest of its stack.
func loopOver(layers []File, q Query) (string, error) {
	return findLoop(slices.Concat(q.Beside, layers), func(loop File) (bool, error) {
		under, err := Layers(loop)
		return slices.ContainsFunc(under[1:], func(f File) bool {
			return slices.Contains(layers, f) || slices.Contains(q.Stack, f)
		}), err
	})
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
func tryExclusive(fd int) error {
	claim, err := unix.Open(sys.ProcFD(fd), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_EXCL, 0)
	sys.CloseFD(claim)
	if IsNoDevice(err) {
		return nil
	}
	return err
}
