package deferral

import (
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxPath    = 4095 // PATH_MAX less its NUL
	maxFlags   = 64
	maxFlagLen = 1024
)

var fsTypeForm = lazily(`^[a-z0-9][a-z0-9._-]{0,31}$`)

// Validate tells, without looking at the system, what is wrong with an
// instruction. No error repeats a mount flag's value: it may be a secret that
// came to the wrong place.
func (in *Instruction) Validate() error {
	if err := checkPath("volume_target_path", in.Target); err != nil {
		return err
	}
	if err := in.checkType(); err != nil {
		return err
	}
	if err := checkPath("volume_backing_path", in.Backing); err != nil {
		return err
	}
	if in.FSType == "" {
		return in.invalid("fs_type is empty: say which filesystem the sandbox shall mount")
	}
	if !fsTypeForm().MatchString(in.FSType) {
		return in.invalid("fs_type %q is not a filesystem's name", clip(in.FSType))
	}
	if err := in.checkFlags(); err != nil {
		return err
	}
	return in.checkGroup()
}

func (in *Instruction) invalid(format string, args ...any) error {
	return Errorf(Invalid, "volume %s: "+format, append([]any{in.Target}, args...)...)
}

func (in *Instruction) checkType() error {
	switch in.Type {
	case Block:
		return nil
	case Network:
		return Errorf(Unsupported, "volume %s: network volumes cannot be deferred by any "+
			"configured runtime handler: publish it on the host, or use a block volume", in.Target)
	default:
		return in.invalid("volume_type is missing: say BLOCK or NETWORK")
	}
}

func (in *Instruction) checkFlags() error {
	if len(in.MountFlags) > maxFlags {
		return in.invalid("%d mount flags are more than the %d that are taken", len(in.MountFlags), maxFlags)
	}
	for i, flag := range in.MountFlags {
		if flag == "" || len(flag) > maxFlagLen || !printable(flag) {
			return in.invalid("mount flag %d is empty, longer than %d bytes, or not printable text", i+1, maxFlagLen)
		}
		if name, secret := secretLike(flag); secret {
			return in.invalid("the mount flag %q looks like a secret, and a deferred instruction "+
				"is kept in clear text: take it out of the mount options, or leave the volume to the host", name)
		}
	}
	if slices.Contains(in.MountFlags, "ro") && slices.Contains(in.MountFlags, "rw") {
		return in.invalid("the mount flags hold both ro and rw")
	}
	return nil
}

func (in *Instruction) checkGroup() error {
	switch in.GroupPolicy {
	case GroupPolicyUnset, GroupAlways, GroupOnMismatch:
	default:
		return in.invalid("unknown supplemental group change policy %q", clip(string(in.GroupPolicy)))
	}
	if in.Group == "" {
		if in.GroupPolicy != GroupPolicyUnset {
			return in.invalid("a supplemental group change policy needs a supplemental group")
		}
		return nil
	}
	gid, err := strconv.ParseUint(in.Group, 10, 32)
	if err != nil || strconv.FormatUint(gid, 10) != in.Group || gid == 1<<32-1 {
		return in.invalid("volume_supplemental_group %q is not a decimal group id", clip(in.Group))
	}
	return nil
}

// readOnly tells whether the flags ask for a read-only mount.
func (in *Instruction) readOnly() bool { return slices.Contains(in.MountFlags, "ro") }

// checkPath accepts an absolute path of printable UTF-8 that climbs nowhere.
func checkPath(field, p string) error {
	switch {
	case p == "":
		return Errorf(Invalid, "%s is empty: it is required", field)
	case len(p) > maxPath:
		return Errorf(Invalid, "%s is %d bytes long: more than the %d that a path may have", field, len(p), maxPath)
	case !utf8.ValidString(p):
		return Errorf(Invalid, "%s is not valid UTF-8", field)
	case !printable(p):
		return Errorf(Invalid, "%s %q holds control characters", field, clip(p))
	case !path.IsAbs(p):
		return Errorf(Invalid, "%s %q is not an absolute path", field, clip(p))
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return Errorf(Invalid, "%s %q climbs with \"..\": give the path it leads to", field, clip(p))
		}
		if len(part) > 255 {
			return Errorf(Invalid, "%s has a name of %d bytes: more than the 255 that a name may have", field, len(part))
		}
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// clip keeps a hostile value from filling a log.
func clip(s string) string {
	const most = 256
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}
