package vm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// createContainer creates a container in the guest, with the volumes that it mounts.
func (s *sandbox) createContainer(ctx context.Context, id, bundle string) (warnings []string, err error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	if sys.IsClosed(s.stop) { // the guest ends those that it has by now
		return nil, errors.New("the sandbox is ending")
	}
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
	defer func() { err = errors.Join(err, handler.CloseAll(found)) }()
	raw, binds, err := guestSpec(id, bundle, spec, found)
	if err != nil {
		return nil, err
	}
	s.volumes.warn = func(text string) { warnings = append(warnings, text) }
	binding := oci.Binding{Sandbox: s.id, Program: s.cfg.Program, Socket: s.dir.volumesSocket()}
	attached := ""
	if err := handler.Attach(found, binding, s.self, func(m *oci.Mount) error {
		attached = m.Volume
		return s.volumes.attach(ctx, m.Volume, m.Info, func() (*os.File, error) { return openDevice(m.Dir(), m.Info) })
	}); err != nil {
		s.volumes.detachUnused(ctx, attached) // it may have been released before it was bound
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
		return nil, errors.Join(err, s.removeContainer(ctx, id))
	}
	return warnings, nil
}

// deleteContainer deletes a container. If the guest cannot, it is killed: the pod could never be deleted.
func (s *sandbox) deleteContainer(ctx context.Context, id string) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	err := s.removeContainer(ctx, id)
	if errors.Is(err, errHung) && !s.volumes.frozen() {
		s.declareHung(err)
	}
	return err
}

// removeContainer removes a container from the guest, and the files that were shared for it.
func (s *sandbox) removeContainer(ctx context.Context, id string) error {
	_, err := s.guest.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})
	if err != nil {
		err = fmt.Errorf("%w: container %s cannot be deleted: %w", errHung, id, err)
	}
	return errors.Join(err, s.share.remove(id))
}
