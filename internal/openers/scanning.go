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
	_ = sockets
	return &scanning{scan.New()}
}

func (s *scanning) look(ctx context.Context, q Query, file File) (found, error) {
	if free, known := countsAsFree(file, q.Own); known && free && len(q.Stack) == 0 {
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
	have, err := s.processes.Find(ctx, q.Servers, layers...)
	if err != nil {
		return found{}, err
	}
	if len(have) > 0 {
		return named(Users{Names: strings.Join(namesOf(have), ", ")}), nil
	}
	loop, err := findLoop(slices.Concat(q.Beside, layers), func(loop File) (bool, error) {
		under, err := Layers(loop)
		return slices.ContainsFunc(under[1:], func(f File) bool {
			return slices.Contains(layers, f) || slices.Contains(q.Stack, f)
		}), err
	})
	return foundLoop(loop), err
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
