package kata

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Publish makes the volume's directory exist with the right mountInfo.json.
//
// The directory is built as a whole beside Kata's tree and renamed into place:
// a reader sees all of it or nothing, and so does a kill. A file in it is
// replaced the same way. No other file ever stands in it.
func (h *Handler) Publish(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	raw, err := encodeInfo(v)
	if err != nil {
		return h.publishError(v, "encoded", err)
	}
	dir := h.volumeDir(v)
	// One retry each way: the directory can come or go between two calls.
	for range 3 {
		published, err := h.publishOnce(v, dir, raw)
		if published || err != nil {
			return err
		}
	}
	return deferral.Errorf(deferral.Busy, "volume %s: another program keeps changing %s: try again", v.Target, dir)
}

func (h *Handler) publishOnce(v *deferral.Volume, dir string, raw []byte) (bool, error) {
	whose, key, err := h.ownerOf(dir)
	if err != nil {
		return false, h.publishError(v, "looked at", err)
	}
	switch {
	case whose == nobody:
		return h.publishNew(v, dir, raw)
	case whose == us && key == v.Key:
		return h.publishAgain(v, dir, raw)
	default:
		return false, deferral.Errorf(deferral.Conflict, "volume %s: another program has already published it to Kata in %s: "+
			"let that program take it back, or remove the directory once no sandbox uses it (`kata-runtime direct-volume remove`)",
			v.Target, dir)
	}
}

// publishNew builds the directory and renames it into place.
func (h *Handler) publishNew(v *deferral.Volume, dir string, raw []byte) (bool, error) {
	temp := h.tempName()
	if err := h.build(temp, v.Key, raw); err != nil {
		h.discard(temp)
		return false, h.publishError(v, "built", err)
	}
	// Watched before anybody can reach it, so that no sandbox id is missed.
	entry := h.track(v)
	h.watchNew(entry, temp)
	failpoint.Hit("kata-built")
	err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
	if err == nil {
		return true, nil
	}
	h.discard(temp)
	h.untrack(v.Key)
	switch {
	case errors.Is(err, unix.EEXIST):
		return false, nil
	case errors.Is(err, unix.ENOENT):
		// Somebody removed Kata's whole root. It is made again.
		return false, h.remake(v)
	default:
		return false, h.publishError(v, "put in place", err)
	}
}

func (h *Handler) build(temp string, key deferral.Key, raw []byte) error {
	if err := unix.Mkdir(temp, 0o700); err != nil {
		return err
	}
	failpoint.Hit("kata-directory-made")
	if err := unix.Lsetxattr(temp, h.mark, []byte(key), 0); err != nil {
		return err
	}
	return writeNew(temp+"/"+infoName, raw)
}

// publishAgain compares, and replaces the file only where it differs.
func (h *Handler) publishAgain(v *deferral.Volume, dir string, raw []byte) (bool, error) {
	file := dir + "/" + infoName
	old, err := readSmall(file, maxInfo)
	if err == nil && bytes.Equal(old, raw) {
		h.track(v)
		return true, nil
	}
	temp := h.tempName()
	if err := writeNew(temp, raw); err != nil {
		_ = unix.Unlink(temp)
		return false, h.publishError(v, "written", err)
	}
	failpoint.Hit("kata-rewritten")
	if err := unix.Rename(temp, file); err != nil {
		_ = unix.Unlink(temp)
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		return false, h.publishError(v, "replaced", err)
	}
	h.track(v)
	return true, nil
}

// Retract takes the volume's directory away, and the sandbox ids in it. What
// another program put there is left alone.
func (h *Handler) Retract(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	if v.ResolvedTarget == "" || len(v.ResolvedTarget) > maxTarget {
		return nil // Kata cannot name it, so it was never published
	}
	dir := h.volumeDir(v)
	whose, _, err := h.ownerOf(dir)
	if err != nil {
		return h.publishError(v, "looked at", err)
	}
	if whose == stranger {
		return nil
	}
	h.untrack(v.Key)
	if whose == nobody {
		return nil
	}
	temp := h.tempName()
	if err := unix.Rename(dir, temp); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return h.publishError(v, "taken away", err)
	}
	failpoint.Hit("kata-taken-away")
	h.discard(temp)
	return nil
}

// discard removes a directory that is already out of Kata's sight. What cannot
// be removed is kept and told of; the next start tries again.
func (h *Handler) discard(temp string) {
	err := unix.Unlink(temp + "/" + infoName)
	if err == nil || errors.Is(err, unix.ENOENT) {
		err = ignoreMissing(unix.Rmdir(temp))
	}
	if errors.Is(err, unix.ENOTEMPTY) {
		err = removeFlat(temp)
	}
	if err != nil {
		h.log.Warn("a leftover directory cannot be removed", zap.String("path", temp), zap.Error(err))
	}
}

// clearTemp removes what a kill left behind.
func (h *Handler) clearTemp() error {
	names, err := readNames(h.cfg.TempDir, maxLeftovers)
	if err != nil {
		return deferral.Errorf(deferral.Internal, "kata: the temporary directory %s cannot be read: %w", h.cfg.TempDir, err)
	}
	for _, name := range names {
		path := filepath.Join(h.cfg.TempDir, name)
		if err := unix.Unlink(path); errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
			h.discard(path)
		}
	}
	return nil
}

const maxLeftovers = 1 << 20

func (h *Handler) volumeDir(v *deferral.Volume) string {
	return h.cfg.DirectVolumes + "/" + dirName(v.ResolvedTarget)
}

func (h *Handler) tempName() string {
	return h.cfg.TempDir + "/" + h.run + "-" + strconv.FormatUint(h.serial.Add(1), 36)
}

func (h *Handler) publishError(v *deferral.Volume, verb string, err error) error {
	kind := kindOfErrno(err)
	hint := ""
	if kind == deferral.Exhausted {
		hint = "; free some room on that filesystem"
	}
	return deferral.Errorf(kind, "volume %s: Kata's mount information below %s cannot be %s: %w%s",
		v.Target, h.cfg.DirectVolumes, verb, err, hint)
}

// Orphans lists our directories of volumes that nobody knows any more.
func (h *Handler) Orphans(known func(deferral.Key) bool) ([]*deferral.Volume, error) {
	names, err := readNames(h.cfg.DirectVolumes, maxVolumes)
	if err != nil {
		return nil, deferral.Errorf(deferral.Internal, "kata: the directory %s cannot be read: %w", h.cfg.DirectVolumes, err)
	}
	var orphans []*deferral.Volume
	for _, name := range names {
		target, ok := targetOf(name)
		if !ok || known(deferral.KeyOf(target)) {
			continue
		}
		dir := filepath.Join(h.cfg.DirectVolumes, name)
		if whose, _, err := h.ownerOf(dir); err == nil && whose == us {
			orphans = append(orphans, readVolume(dir, target))
		}
	}
	return orphans, nil
}

// remake makes Kata's root again after somebody removed it.
func (h *Handler) remake(v *deferral.Volume) error {
	for _, dir := range []string{h.cfg.DirectVolumes, h.cfg.TempDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return h.publishError(v, "put in place", err)
		}
	}
	return nil
}

// maxVolumes bounds a listing of Kata's tree.
const maxVolumes = 1 << 20
