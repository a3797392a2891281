package vm

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

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
	defer func() { err = errors.Join(err, handler.CloseAll(found)) }()
	copies := s.cfg.Virtiofsd == ""
	raw, binds, err := guestSpec(id, bundle, spec, found, copies)
	if err != nil {
		return nil, err
	}
	s.volumes.warn = func(text string) { warnings = append(warnings, text) }
	binding := oci.Binding{Sandbox: s.id, Program: s.cfg.Program, Socket: s.place.volumes()}
	if err := handler.Attach(found, binding, s.self, func(volume string, info abi.Info) error {
		return s.volumes.ensure(ctx, volume, info, func() (*os.File, error) { return openDevice(info) })
	}); err != nil {
		return nil, err
	}
	req := &wire.CreateContainerRequest{Container: id, Spec: raw}
	for _, m := range found {
		req.Volumes = append(req.Volumes, &wire.VolumeMount{Mount: uint32(m.Index), Volume: m.Volume, SubPath: m.Sub}) //nolint:gosec // a small index
	}
	if req.Image, err = s.show(ctx, id, binds, copies); err == nil {
		_, err = s.guest.CreateContainer(ctx, req)
	}
	if err != nil {
		return nil, errors.Join(err, s.undo(ctx, id))
	}
	return warnings, nil
}

// delete forgets a container. A guest that does not let go of it would keep its pod for ever.
func (s *sandbox) delete(ctx context.Context, id string) error {
	s.making.Lock()
	defer s.making.Unlock()
	err := s.undo(ctx, id)
	if errors.Is(err, errHangs) && !s.volumes.frozen() {
		s.hang(err)
	}
	return err
}

// undo takes back what a container has, in the guest and of what it was shown. An image
// that another container has a file of stays until the end of the sandbox.
func (s *sandbox) undo(ctx context.Context, id string) error {
	_, err := s.guest.DeleteProcess(ctx, &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})
	if err != nil {
		err = fmt.Errorf("%w: container %s cannot be deleted: %w", errHangs, id, err)
	}
	if err := s.volumes.remove(ctx, imageName(s.share.of(id))); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "the image of container %s: %v\n", id, err)
	}
	return errors.Join(err, s.share.remove(id))
}

// show makes what is bound visible to the guest, or a copy of it, and gives the copy's name.
func (s *sandbox) show(ctx context.Context, id string, binds []bind, copies bool) (image string, err error) {
	for _, b := range binds {
		b.noLinks = copies // whoever can change it could make them while it is copied
		if err := s.share.add(b); err != nil {
			return "", err
		}
	}
	if !copies {
		return "", nil
	}
	copying, cancel := context.WithTimeout(ctx, imageTime)
	defer cancel()
	go func() {
		select {
		case <-s.stop:
			cancel() // the end of the sandbox does not wait for it
		case <-copying.Done():
		}
	}()
	file, err := makeImage(copying, s.cfg, s.share.of(id))
	if err = errors.Join(err, s.share.remove(id)); err != nil {
		_ = file.Close()
		return "", fmt.Errorf("the image of its root filesystem: %w", err)
	}
	return s.volumes.plugImage(ctx, s.share.of(id), file)
}
