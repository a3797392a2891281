package kata

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

func (s *Shim) handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.misbehave(w, r) {
			return
		}
		post := r.Method == http.MethodPost
		switch {
		case r.URL.Path == "/direct-volume/stats" && (post || s.opts.Flavor == Go):
			s.serveStats(w, r)
		case r.URL.Path == "/direct-volume/resize" && post:
			s.serveResize(w, r)
		case s.opts.Flavor == Rust:
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, "URL NOT FOUND")
		default:
			http.NotFound(w, r)
		}
	})
}

// fail answers with an error: runtime-rs closes the connection instead.
func (s *Shim) fail(w http.ResponseWriter, text string, status int) {
	if s.opts.Flavor == Rust {
		hangUp(w)
		return
	}
	http.Error(w, text, status)
}

func (s *Shim) serveStats(w http.ResponseWriter, r *http.Request) {
	name, status, err := s.volumeName(r)
	if err != nil {
		s.fail(w, err.Error(), status)
		return
	}
	var body []byte
	s.locked(func() { body = s.body })
	if body == nil {
		body, err = s.stats(name)
	}
	if err != nil {
		s.fail(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(body)
}

func (s *Shim) stats(name string) ([]byte, error) {
	st, err := s.statfs(name)
	if err != nil {
		return nil, err
	}
	if s.opts.Flavor == Rust {
		return []byte(debugStats(st)), nil
	}
	return jsonStats(st)
}

// volumeName reads the query. The Go shim unescapes the decoded value again;
// runtime-rs parses the request's target as an absolute URL.
func (s *Shim) volumeName(r *http.Request) (string, int, error) {
	if s.opts.Flavor == Rust && !strings.HasPrefix(r.RequestURI, "http://") {
		return "", http.StatusInternalServerError, errors.New("relative URL without a base")
	}
	name := r.URL.Query().Get("path")
	if name == "" {
		return "", http.StatusBadRequest, errors.New("the parameter path is required")
	}
	if s.opts.Flavor == Rust {
		return name, 0, nil
	}
	device, err := url.PathUnescape(name)
	if err != nil {
		return "", http.StatusInternalServerError, err
	}
	return device, 0, nil
}

func (s *Shim) statfs(name string) (unix.Statfs_t, error) {
	var fs Statfs
	s.locked(func() { fs = s.mounts[name] })
	if fs != nil {
		return fs()
	}
	if s.opts.Flavor == Rust && s.opts.Shared != "" && name != "" {
		// An ended container's directory is still there, and the host's.
		return MountedAt(filepath.Join(s.opts.Shared, s.opts.SandboxID, "rw", "passthrough", filepath.Base(name)))()
	}
	return unix.Statfs_t{}, fmt.Errorf("mount %s not found in sandbox", name)
}

// usage is the agent's VolumeUsage as Go's generated code prints it.
type usage struct {
	Available uint64 `json:"available,omitempty"`
	Total     uint64 `json:"total,omitempty"`
	Used      uint64 `json:"used,omitempty"`
	Unit      int    `json:"unit,omitempty"`
}

type condition struct {
	Abnormal bool   `json:"abnormal,omitempty"`
	Message  string `json:"message,omitempty"`
}

// usages counts as the agent does: available is all that is free, and used is the rest.
func usages(st unix.Statfs_t) (bytes, inodes usage) {
	size := uint64(st.Bsize) //nolint:gosec // the kernel gives no negative size
	bytes = usage{Available: st.Bfree * size, Total: st.Blocks * size, Used: (st.Blocks - st.Bfree) * size, Unit: 1}
	inodes = usage{Available: st.Ffree, Total: st.Files, Used: st.Files - st.Ffree, Unit: 2}
	return bytes, inodes
}

func jsonStats(st unix.Statfs_t) ([]byte, error) {
	bytes, inodes := usages(st)
	return json.Marshal(struct {
		Usage     []*usage   `json:"usage,omitempty"`
		Condition *condition `json:"volume_condition,omitempty"`
	}{[]*usage{&bytes, &inodes}, &condition{Message: "OK"}})
}

const specialFields = "special_fields: SpecialFields { unknown_fields: UnknownFields { fields: None }, " +
	"cached_size: CachedSize { size: 0 } }"

func debugStats(st unix.Statfs_t) string {
	bytes, inodes := usages(st)
	return fmt.Sprintf("Usage: [%s, %s] Volume Condition: VolumeCondition { abnormal: false, message: \"OK\", %s }",
		debugUsage(bytes, "BYTES"), debugUsage(inodes, "INODES"), specialFields)
}

func (s *Shim) negative() string {
	if s.opts.Flavor == Rust {
		return strings.Replace(debugStats(unix.Statfs_t{Bsize: 1, Blocks: 2, Bfree: 1}), "available: ", "available: -", 1)
	}
	return `{"usage":[{"available":-1,"total":2,"used":1,"unit":1}]}`
}

func debugUsage(u usage, unit string) string {
	return fmt.Sprintf("VolumeUsage { available: %d, total: %d, used: %d, unit: %s, %s }",
		u.Available, u.Total, u.Used, unit, specialFields)
}

func (s *Shim) serveResize(w http.ResponseWriter, r *http.Request) {
	var request struct {
		VolumePath string
		Size       uint64
		GuestPath  string `json:"volume_guest_path"`
	}
	if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&request); err != nil {
		s.fail(w, err.Error(), http.StatusInternalServerError)
		return
	}
	name := request.VolumePath
	if s.opts.Flavor == Rust {
		name = request.GuestPath
	}
	_, err := s.statfs(name)
	switch {
	case err == nil && s.opts.Resize != nil:
		err = s.opts.Resize(name, request.Size)
	case err == nil:
		err = errors.New("rpc error: code = Unimplemented desc = resize_volume is not implemented")
	}
	if err != nil {
		s.fail(w, err.Error(), http.StatusInternalServerError)
	}
}
