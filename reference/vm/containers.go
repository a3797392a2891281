package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

func (r request) process() *wire.Process { return &wire.Process{Container: r.Container, Exec: r.Exec} }

// do runs a command that has one answer.
func (s *sandbox) do(ctx context.Context, r request) (a answer, err error) {
	switch r.Do {
	case doCreate:
		a.Warnings, err = s.create(ctx, r.Container, r.Bundle)
	case doStart:
		_, err = s.guest.StartContainer(ctx, &wire.StartContainerRequest{Container: r.Container})
	case doExec:
		_, err = s.guest.ExecProcess(ctx, &wire.ExecProcessRequest{Process: r.process(), Spec: r.Process})
	case doSignal:
		_, err = s.guest.SignalProcess(ctx, &wire.SignalProcessRequest{Process: r.process(), Signal: r.Signal, All: r.All})
	case doDelete:
		err = s.delete(ctx, r.Container)
	case doTerminal:
		_, err = s.guest.ResizeTerminal(ctx, &wire.ResizeTerminalRequest{Process: r.process(), Columns: r.Columns, Rows: r.Rows})
	case doShutdown:
		s.shutdown()
	case abi.Stats:
		var reply abi.StatsReply
		reply, _, err = s.volumes.Stats(r.Target)
		a.Stats = &reply
	case abi.Resize:
		a.Size, err = s.volumes.Resize(r.Target, r.Least, r.Most)
	case abi.Freeze:
		err = s.volumes.Freeze(r.Target, r.Timeout)
	case abi.Thaw:
		err = s.volumes.Thaw(r.Target)
	default:
		err = fmt.Errorf("%q cannot be asked", r.Do)
	}
	return a, err
}

// create makes a container ready in the guest, with the volumes that it mounts.
func (s *sandbox) create(ctx context.Context, id, bundle string) (warnings []string, err error) {
	s.making.Lock()
	defer s.making.Unlock()
	spec, err := readSpec(bundle)
	if err != nil {
		return nil, err
	}
	if of, known := oci.SandboxOf(spec); !known || of.Self || of.ID != s.id || of.PodUID != s.podUID {
		return nil, fmt.Errorf("it is of the pod %q, and sandbox %s is of the pod %q", of.PodUID, s.id, s.podUID)
	}
	found, err := oci.Find(oci.Config{Root: s.cfg.Root}, spec, s.podUID)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, m := range found {
			err = errors.Join(err, m.Close())
		}
	}()
	raw, binds, err := guestSpec(id, bundle, spec, found)
	if err != nil {
		return nil, err
	}
	s.volumes.warn = func(text string) { warnings = append(warnings, text) }
	if err := s.mount(ctx, found); err != nil {
		return nil, err
	}
	req := &wire.CreateContainerRequest{Container: id, Spec: raw}
	for _, m := range found {
		req.Volumes = append(req.Volumes, &wire.VolumeMount{Mount: uint32(m.Index), Volume: m.Volume, SubPath: m.Sub}) //nolint:gosec // a small index
	}
	for _, b := range binds {
		if err == nil {
			err = s.share.add(b)
		}
	}
	if err == nil {
		_, err = s.guest.CreateContainer(ctx, req)
	}
	if err != nil {
		return nil, errors.Join(err, s.share.remove(id))
	}
	return warnings, nil
}

// mount makes the guest mount every volume, and tells the broker.
func (s *sandbox) mount(ctx context.Context, found []*oci.Mount) error {
	note, err := json.Marshal(s.self)
	if err != nil {
		return err
	}
	binding := oci.Binding{Sandbox: s.id, Note: note, Program: s.cfg.Program, Socket: s.place.volumes()}
	done := make(map[string]bool)
	for _, m := range found {
		if done[m.Volume] {
			continue
		}
		done[m.Volume] = true
		if err := s.volumes.ensure(ctx, m); err != nil {
			return volumeError(m, err)
		}
		failpoint.Hit("crust-vm-attached")
		if err := m.Bind(binding); err != nil {
			return volumeError(m, fmt.Errorf("the broker cannot be told of the sandbox: %w", err))
		}
		failpoint.Hit("crust-vm-bound")
	}
	return nil
}

// delete forgets a container, in the guest and in what it is shown.
func (s *sandbox) delete(ctx context.Context, id string) error {
	s.making.Lock()
	defer s.making.Unlock()
	_, err := s.guest.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})
	return errors.Join(err, s.share.remove(id))
}

// output sends what a process says until it has said all.
func (s *sandbox) output(ctx context.Context, r request, to io.Writer) {
	for {
		said, err := s.guest.ReadOutput(ctx, &wire.ReadOutputRequest{Process: r.process(), Stream: wire.Stream(r.Stream), Max: wire.MaxData})
		if err != nil || len(said.GetData()) == 0 {
			return
		}
		if _, err := to.Write(said.GetData()); err != nil {
			return
		}
	}
}

// input gives a process what comes, and then the end.
func (s *sandbox) input(ctx context.Context, r request, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			taken, err := s.guest.WriteInput(ctx, &wire.WriteInputRequest{Process: r.process(), Data: data})
			if err != nil {
				return
			}
			data = data[min(int(taken.GetWritten()), len(data)):]
		}
		if err != nil {
			break
		}
	}
	_, _ = s.guest.WriteInput(ctx, &wire.WriteInputRequest{Process: r.process()})
}

// wait answers when the process has ended. When who waits is gone before, the process is
// ended: for the container runtime it has ended already.
func (s *sandbox) wait(ctx context.Context, r request, conn net.Conn, in io.Reader) {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	ended, err := s.guest.WaitProcess(waiting, &wire.WaitProcessRequest{Process: r.process()})
	if waiting.Err() != nil && ctx.Err() == nil {
		s.abandon(ctx, r)
		return
	}
	a := answer{ExitCode: ended.GetExitCode()}
	a.OutOfMemory = r.Exec == "" && a.ExitCode == uint32(lostCode) && ended.GetOomKilled()
	if err != nil {
		a = answer{Error: err.Error(), Kind: abi.ExitRefused}
	}
	_ = json.NewEncoder(conn).Encode(a)
	if r.Exec != "" && err == nil {
		// Its output is read to the end first, which who waits tells by hanging up.
		select {
		case <-waiting.Done():
		case <-time.After(abandonTime):
		}
		s.abandon(ctx, r)
	}
}

// abandonTime bounds how long the output of a process that has ended is kept.
const abandonTime = time.Minute

func (s *sandbox) abandon(ctx context.Context, r request) {
	if r.Exec != "" {
		_, _ = s.guest.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: r.process()})
		return
	}
	_, _ = s.guest.SignalProcess(ctx, &wire.SignalProcessRequest{Process: r.process(), Signal: 9, All: true})
}
