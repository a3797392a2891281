package kata

import (
	"context"
	"errors"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// maxAsked bounds the paths that one call asks for.
const maxAsked = 32

// settled is how long a directory is known in which the guest has mounted what it ever will: it does so right after
// the directory was made. When that was, a clock that was set does not say. Tests change it.
var settled = time.Minute

// guestSearch finds the path at which a runtime-rs sandbox has a volume mounted, for one call. That path is recorded
// nowhere. runtime-rs makes a directory for each volume of each container in the sandbox's shared directory, and leaves
// it there when the container has ended. The agent goes on answering for such a path, with the numbers of the host's
// filesystem that the directory is on. So the newest path is asked first, and an answer is believed only if it is not
// the host's, fits the volume's device, and cannot be of another volume of the pod.
type guestSearch struct {
	h    *Handler
	v    *volume.Volume
	shim shim
	conn *conn // for the first request, or nil
	// unknown is set if the container runtime cannot be asked which paths are the volume's.
	unknown bool
	// unlike is why the last answer was not believed, or its error. It is the result if no path is left.
	unlike error
}

// stats tries one path after the other until an answer is believed.
func (s *guestSearch) stats(ctx context.Context) (volume.Report, error) {
	if sys.IsEmptyDir(s.v.Target) {
		return volume.Report{}, volume.Errorf(volume.Unsupported, "volume %s: it is an emptyDir that Kata keeps on a disk image, and "+
			"%s does not record its path in the guest: look at it inside the pod", s.v.Target, rustShim)
	}
	remembered := ""
	if s.h.bindings.current(s.v).id == s.shim.id {
		remembered = s.h.guests.path(s.v.Key, s.shim.id)
	}
	if remembered != "" {
		if report, done, err := s.try(ctx, remembered); done {
			return report, err
		}
		s.h.guests.setPath(s.v.Key, s.shim.id, "")
	}
	dirs, err := s.list(ctx)
	if err != nil {
		return volume.Report{}, err
	}
	for _, dir := range dirs[:min(len(dirs), maxAsked)] {
		if path := guestShared + dir.name; path != remembered {
			if report, done, err := s.try(ctx, path); done {
				return report, err
			}
		}
	}
	return volume.Report{}, s.notMounted()
}

// list lists the directories that can be the volume's.
func (s *guestSearch) list(ctx context.Context) ([]sharedDir, error) {
	dirs, err := s.listShared()
	if err != nil {
		return nil, err
	}
	return s.ofVolume(ctx, dirs)
}

func (s *guestSearch) ask(ctx context.Context, path string) (volume.Report, error) {
	c := s.conn
	s.conn = nil
	if c == nil {
		var err error
		if c, err = s.h.client.reach(ctx, s.shim); err != nil {
			return volume.Report{}, s.h.client.unreached(ctx, s.v, failure{s.shim.id, err})
		}
	}
	// The target has the absolute form: the shim parses it as a URL, which needs a host.
	request := "POST http://shim" + statsPath + escape(path) + " HTTP/1.1\r\nHost: shim\r\nContent-Length: 0\r\n\r\n"
	return s.h.askStats(ctx, s.v, s.shim, c, []byte(request))
}

// guestShared is where the guest sees the directory that its sandbox shares with the host.
const guestShared = "/run/kata-containers/shared/containers/passthrough/"

// try asks for the stats of a path. With done, its answer or error is the result of the search.
func (s *guestSearch) try(ctx context.Context, path string) (report volume.Report, done bool, err error) {
	report, err = s.ask(ctx, path)
	if !isAboutPath(err) {
		return report, true, err
	}
	if s.ofHost(report) {
		s.markEmpty(path)
		return report, false, nil
	}
	others, failed := s.others(ctx, path, report)
	mine, known := s.matches(s.v, report)
	switch {
	case failed != nil:
		return report, true, failed
	case len(others) > 0 && (err != nil || known && !mine):
		// It is another volume's: too large for this one, or of another filesystem.
	case err != nil:
		s.unlike = err
	case len(others) > 0:
		s.unlike = volume.Errorf(volume.Unsupported, "volume %s: Kata sandbox %s (%s) has a filesystem mounted that can be "+
			"this volume's or that of %s, for their mount paths in the containers end alike and their sizes do not tell them "+
			"apart: give the volumeMounts' paths different last elements", s.v.Target, s.shim.id, rustShim, others[0])
	default:
		if s.h.bindings.current(s.v).id == s.shim.id {
			s.h.guests.setPath(s.v.Key, s.shim.id, path)
		}
		return report, true, nil
	}
	return report, false, nil
}

// isAboutPath reports whether an error, or nil, is an answer about the path that was asked
// for. runtime-rs closes the connection without an answer where it means "error".
func isAboutPath(err error) bool {
	if err == nil || errors.Is(err, errHungUp) {
		return true
	}
	switch volume.KindOf(err) {
	case volume.Absurd, volume.Refused, volume.Unsupported:
		return true
	default:
		return false
	}
}

// ofHost reports whether the answer has the numbers of the host's directory: then the guest has nothing mounted there.
func (s *guestSearch) ofHost(report volume.Report) bool {
	if len(report.Usage) == 0 {
		return false
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.passthrough("rw"), &st); err != nil {
		return false
	}
	bytes, inodes := totals(report)
	return bytes == int64(st.Blocks)*st.Bsize && inodes == int64(st.Files) //nolint:gosec // the node's own sizes
}

func totals(report volume.Report) (bytes, inodes int64) {
	for _, usage := range report.Usage {
		switch usage.Unit {
		case volume.UnitBytes:
			bytes = usage.Total
		case volume.UnitInodes:
			inodes = usage.Total
		}
	}
	return bytes, inodes
}

// others lists the pod's other volumes that the answer can be of: those that are not known to hold another filesystem,
// are large enough, and have a mount path with the same last element. If this volume's filesystem is known to match,
// others count only if they are known to match as well.
func (s *guestSearch) others(ctx context.Context, at string, report volume.Report) ([]string, error) {
	if len(report.Usage) == 0 {
		return nil, nil
	}
	mine, _ := s.matches(s.v, report)
	var names []string
	for _, other := range s.ofPod() {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		theirs, sure := s.matches(other, report)
		if sure && !theirs || mine && !sure || guest.CheckSize(other, report) != nil {
			continue
		}
		alike, err := s.endsAlike(ctx, at, other)
		if err != nil {
			return nil, err
		}
		if alike {
			names = append(names, other.Target)
		}
	}
	return names, nil
}

func (s *guestSearch) matches(v *volume.Volume, report volume.Report) (is, sure bool) {
	bytes, inodes := totals(report)
	return s.h.cfg.Disks.Matches(v, bytes, inodes)
}

// endsAlike reports whether the name of a path can be of another volume.
func (s *guestSearch) endsAlike(ctx context.Context, at string, other *volume.Volume) (bool, error) {
	if s.h.sandboxes == nil {
		return true, nil
	}
	destinations, err := s.h.sandboxes.Destinations(ctx, s.shim.id, other.ResolvedTarget)
	if err != nil {
		return false, s.trackerError(ctx, err)
	}
	return endsIn(path.Base(at), destinations), nil
}

// notMounted is the error if no path is left.
func (s *guestSearch) notMounted() error {
	if s.unlike != nil {
		return s.unlike
	}
	return volume.Errorf(volume.NoSandbox, "volume %s: Kata sandbox %s (%s) does not have it mounted now: "+
		"no container with the volume has started yet, or the last one has ended", s.v.Target, s.shim.id, rustShim)
}

func (s *guestSearch) ofPod() []*volume.Volume {
	if s.v.PodUID == "" {
		return nil
	}
	return s.h.store.Bindings.Volumes(func(e projection.Entry) bool {
		return e.Volume.Key != s.v.Key && e.Volume.PodUID == s.v.PodUID && e.Volume.Device.Path != ""
	})
}

// markEmpty records that nothing is mounted at a path, of a volume that is not forgotten yet.
func (s *guestSearch) markEmpty(at string) {
	if _, tracked := s.h.store.Bindings.Get(s.v.Key); tracked {
		s.h.guests.markEmpty(s.v.Key, path.Base(at))
	}
}
