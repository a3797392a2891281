package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

// settings holds the configuration in force. The file may change while the daemon runs.
type settings struct {
	flags *config.Flags
	log   *zap.Logger
	// apply passes a changed configuration to the parts of the daemon.
	apply   func(*config.Config)
	watcher *config.Watcher
	hangups <-chan os.Signal
	// settled is set when a start begins to change the node: later errors are not the configuration's.
	settled bool
	// failed is the file with which the daemon could not start, and why: it stays bad until it is changed,
	// or the drivers that were behind the front have moved back.
	failed    []byte
	failedFor error

	inForce atomic.Pointer[config.Config]
	state   atomic.Pointer[fileState]
}

// fileState is how the configuration file relates to what is in force.
type fileState struct {
	raw      []byte // the file when it was handled; nil if it could not be read
	bad      error  // what is wrong with it, or nil
	badSince time.Time
	// accepted is when what is in force was accepted, if the daemon started with that because the
	// file was bad; otherwise zero.
	accepted    time.Time
	needRestart []string // the keys whose new values are not in force
	notKept     error    // why a start with a bad file would not have this configuration
}

func (s *settings) get() *config.Config { return s.inForce.Load() }

// file is never nil.
func (s *settings) file() fileState {
	if state := s.state.Load(); state != nil {
		return *state
	}
	return fileState{}
}

func (s *settings) put(cfg *config.Config) {
	s.inForce.Store(cfg)
	for _, line := range cfg.Warnings() {
		s.log.Warn("the configuration is allowed, and rarely meant", zap.String("problem", line))
	}
}

// load returns the configuration to start with: the file's, or the one that was accepted last.
func (s *settings) load() (config.Config, error) {
	cfg, err := s.flags.Load()
	if err != nil {
		return s.fallBack(err)
	}
	s.state.Store(&fileState{raw: s.flags.Raw})
	return cfg, nil
}

// fallBack returns the configuration that was accepted last, when the file's cannot be loaded or the
// daemon cannot start with it. If there is no other than the file's, it returns the cause.
func (s *settings) fallBack(cause error) (config.Config, error) {
	if s.settled || errors.Is(cause, errOtherDaemon) || s.file().bad != nil || s.flags.File == "" || s.flags.Accepted == "" {
		return config.Config{}, cause
	}
	cfg, raw, err := s.flags.LoadAccepted()
	if errors.Is(err, os.ErrNotExist) {
		return config.Config{}, cause
	}
	if err != nil {
		s.log.Error("the configuration that was accepted last cannot be used either", zap.Error(err))
		return config.Config{}, cause
	}
	if s.state.Load() != nil { // it was loaded
		if bytes.Equal(raw, s.flags.Raw) {
			return config.Config{}, cause
		}
		s.failed, s.failedFor = s.flags.Raw, cause
	}
	now := fileState{raw: s.flags.Raw, bad: cause, badSince: changedAt(s.flags.File), accepted: changedAt(s.flags.Accepted)}
	if now.badSince.Before(now.accepted) { // by a newer program, the same file was good for the older one
		now.badSince = now.accepted
	}
	s.state.Store(&now)
	s.logBad("the configuration file is bad", cause)
	s.log.Error("crust-proxy starts with the configuration that was accepted last", zap.Time("bad_since", now.badSince), zap.Time("accepted", now.accepted))
	return cfg, nil
}

func (s *settings) logBad(message string, bad error) {
	if file, ok := errors.AsType[*config.FileError](bad); ok {
		file.Log(s.log, message)
		return
	}
	s.log.Error(message, zap.Error(bad))
}

// changedAt returns when a file was changed last, and now if that is not known.
func changedAt(file string) time.Time {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return time.Now()
	}
	return time.Unix(st.Ctim.Unix())
}

// keep copies the file to where a start with a bad file finds it. Only what is entirely in force is
// kept, after the daemon has started with it: the copy must be known to work.
func (s *settings) keep() {
	now := s.file()
	if s.flags.Accepted == "" || now.raw == nil || now.bad != nil || len(now.needRestart) > 0 {
		return
	}
	now.notKept = os.MkdirAll(filepath.Dir(s.flags.Accepted), 0o700)
	if now.notKept == nil {
		now.notKept = sys.WriteSynced(s.flags.Accepted, now.raw)
	}
	if now.notKept != nil {
		s.log.Error("the accepted configuration cannot be kept for a start with a bad file", zap.String("file", s.flags.Accepted), zap.Error(now.notKept))
	}
	s.state.Store(&now)
}

// findings describes what is wrong with the configuration, for doctor. A bad file is an error.
func (s *settings) findings() (errors, out []string) {
	now := s.file()
	at := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	bad := sys.ClipTo(oneLine.Replace(fmt.Sprint(now.bad)), maxFinding)
	switch {
	case now.bad != nil && now.accepted.IsZero():
		errors = append(errors, fmt.Sprintf("the configuration file is bad since %s, and what was in force before it stays: %s", at(now.badSince), bad))
	case now.bad != nil:
		errors = append(errors, fmt.Sprintf("the configuration file is bad since %s, and crust-proxy runs with the one that was accepted at %s: %s",
			at(now.badSince), at(now.accepted), bad))
	case len(now.needRestart) > 0:
		out = append(out, fmt.Sprintf("the configuration file was changed, and until crust-proxy is restarted the old values stay in force of: %s",
			strings.Join(now.needRestart, ", ")))
	case now.notKept != nil:
		out = append(out, fmt.Sprintf("the configuration in force cannot be kept in %s, and a start with a bad file fails, or uses an older one: %v: "+
			"correct that, and reload", s.flags.Accepted, now.notKept))
	}
	for _, line := range s.get().Warnings() {
		out = append(out, "the configuration is allowed, and rarely meant: "+line)
	}
	return errors, out
}

// maxFinding bounds what is said of a bad file; the log has more.
const maxFinding = 4096

// oneLine joins the lines of an error, because a finding is one.
var oneLine = strings.NewReplacer(":\n  ", ": ", "\n  ", ", ", ".\n", ". ", "\n", "; ")

func (s *settings) measure(_ context.Context, into *telemetry.NodeState) {
	into.ConfigBadSince = s.file().badSince
}

func (s *settings) run(ctx context.Context) error {
	s.keep() // here, because a disk that hangs must not hold up the start
	return s.watcher.Run(ctx, s.hangups, s.reload)
}

// reload puts in force what can be changed without a restart. A bad file changes
// nothing, and is a finding of doctor until it is corrected. Only run calls it: of two reloads
// at once, the one that read an older file could be applied last.
func (s *settings) reload() {
	old := s.file()
	next, err := s.flags.Load()
	switch {
	case err == nil && s.failed != nil && bytes.Equal(s.flags.Raw, s.failed) && !errors.Is(s.failedFor, errFrontStays):
		err = s.failedFor
	case err == nil:
		if err = mayMove(s.get(), &next); err == nil && s.get().Front.Enabled {
			err = mayLeave(s.get(), &next)
		}
	}
	if err != nil {
		s.reject(err, old)
		return
	}
	if old.bad == nil && bytes.Equal(s.flags.Raw, old.raw) { // SIGHUP after the watcher, or the reverse
		s.log.Debug("the configuration file is unchanged")
		if old.notKept != nil {
			s.keep()
		}
		return
	}
	applied, needRestart := config.Reloadable(*s.get(), next)
	s.put(&applied)
	s.apply(&applied)
	s.state.Store(&fileState{raw: s.flags.Raw, needRestart: needRestart})
	s.keep() // before the log line: who reads it may kill the daemon, and a start with a bad file uses this one then
	s.log.Info("configuration reloaded", zap.Strings("needs_restart", needRestart))
}

// reject records that the file is bad, and logs it unless the same was logged before.
func (s *settings) reject(err error, old fileState) {
	now := fileState{raw: s.flags.Raw, bad: err, badSince: time.Now(), accepted: old.accepted}
	if old.bad != nil {
		now.badSince = old.badSince
	}
	s.state.Store(&now)
	if old.bad == nil || old.bad.Error() != err.Error() {
		s.logBad("the changed configuration is bad; the old one stays in force", err)
	}
}

func (s *settings) shown() (path, yaml string) {
	text, err := s.get().YAML()
	if err != nil {
		text = "# cannot be shown: " + err.Error()
	}
	return s.flags.File, text
}

// digest is the same on nodes whose configurations differ at most in the node's name.
func (s *settings) digest() string {
	cfg := *s.get()
	cfg.Cluster.NodeName = ""
	text, err := cfg.YAML()
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
}
