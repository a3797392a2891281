package conformance

import (
	"maps"
	"slices"
)

// requirement is what docs/runtime-authors.md demands, in one line, and in which section.
type requirement struct{ section, text string }

// RequirementNames lists all that are tested, by name.
func RequirementNames() []string { return slices.Sorted(maps.Keys(requirements())) }

// requirements are all that are tested.
func requirements() map[string]requirement {
	return map[string]requirement{
		"plain-container":    {"10", "a container without deferred volumes starts as if there were none"},
		"mount-inside":       {"7", "the container sees the volume's filesystem in the guard's place, and can write to it"},
		"mount-host":         {"7", "the filesystem is in the host's mountinfo at no time, and the host goes on seeing the guard"},
		"mount-grown":        {"7", "a filesystem that is smaller than its device is grown before anybody sees it"},
		"mount-shared":       {"7", "all containers of a pod share one mount of the filesystem"},
		"mount-extra":        {"5", "keys of mountInfo.json that are not known are passed over"},
		"mount-bare":         {"5", "a mountInfo.json without the crust. keys is enough to mount"},
		"mount-options":      {"5", "options that speak of the mount have their effect on it"},
		"mount-two":          {"7", "a container has two volumes, and one of them twice: each is in its place"},
		"mount-at-once":      {"7", "containers of a pod that are created at once get one mount of the filesystem"},
		"mount-killed":       {"7", "after the handler was killed while it created a container, the next attempt succeeds"},
		"binding-files":      {"11", "after the mount there are a file named by the sandbox id, and runtime-cli; nothing else is left"},
		"binding-program":    {"15", "runtime-cli names a program that the broker can run: root's, written by root alone, reached without links"},
		"binding-info":       {"4", "the handler leaves mountInfo.json as it is"},
		"life-container":     {"7", "the mount survives each of the pod's containers"},
		"life-free":          {"7", "when sandbox and containers have ended, however, the device is free without anybody's help"},
		"life-answer":        {"12", "of a volume whose sandbox has ended the program says status 3"},
		"life-again":         {"1", "a new sandbox of the same pod mounts the volume again"},
		"life-newest":        {"11", "the new sandbox is asked, though the dead one's file is still there"},
		"sub-bound":          {"6", "a sub-directory that kubelet bound through a descriptor is known by mountinfo, and only it is shown"},
		"sub-names":          {"6", "the names of sub-directories are read from mountinfo with their escapes"},
		"sub-path":           {"6", "a source that leads into the guard by its path alone shows the sub-directory"},
		"sub-made":           {"9", "a sub-directory that the volume has not is made, root's, with the mode of the volume's root directory"},
		"sub-link":           {"9", "a link that leads out of the volume is refused"},
		"sub-race":           {"15", "a directory that the workload swaps for a link meanwhile is shown as it was, or refused"},
		"sub-file":           {"9", "a sub-directory that is a file in the volume is refused"},
		"sub-deleted":        {"6", "a sub-directory that was removed from the guard meanwhile is refused"},
		"ro-mount":           {"9", "a read-only mount of one container cannot be written to, and others still can"},
		"ro-recursive":       {"9", "a mount of one container that is read-only with all below it (rro) cannot be written to"},
		"ro-volume":          {"9", "a read-only volume can be read, and not be written to"},
		"ro-group":           {"8", "a read-only volume is not given to a group"},
		"ro-sub":             {"9", "nothing is made in a read-only volume: a sub-directory that it has not is refused"},
		"users-mapped":       {"9", "the ID mappings of a mount have their effect, or the container is refused"},
		"group-always":       {"8", "Always: every file has the group, its owner, and 0660 added to its mode (directories 02770)"},
		"group-setid":        {"8", "setuid and setgid, which a change of the group drops, are put back"},
		"group-link":         {"8", "a symbolic link gets the group and is not followed"},
		"group-fixed":        {"8", "a file that cannot be changed is left as it is, and is no error"},
		"group-match":        {"8", "OnRootMismatch: where the root directory is right nothing is changed"},
		"group-mismatch":     {"8", "OnRootMismatch: where the root directory is not right all is changed"},
		"refuse-pod":         {"10", "a volume of another pod is refused"},
		"refuse-unpublished": {"10", "a guard whose volume has no directory is refused"},
		"refuse-alone":       {"10", "a container that is of no sandbox does not get a volume, nor does a sandbox itself"},
		"refuse-device":      {"10", "a device that is not crust.device is refused"},
		"refuse-target":      {"5", "a mountInfo.json of another target path is refused"},
		"refuse-type":        {"18", "a volume-type that is not known is refused"},
		"refuse-broken":      {"5", "a mountInfo.json that cannot be read is refused"},
		"refuse-option":      {"10", "an option that the filesystem does not know, or that cannot be meant, is refused"},
		"refuse-second":      {"10", "a device that another sandbox has mounted is refused"},
		"refuse-clean":       {"10", "a refusal leaves nothing mounted and no binding"},
		"refuse-others":      {"10", "whatever is wrong with a volume, containers without it start"},
		"stats-true":         {"12", "stats are those of statfs in the sandbox, and nothing is abnormal"},
		"stats-sane":         {"12", "no number is negative, and neither used nor available is more than total"},
		"cli-unknown":        {"12", "of a volume that no sandbox has the program says status 3"},
		"cli-arguments":      {"12", "of arguments that cannot be meant the program says status 2"},
		"socket-same":        {"13", "the socket gives the same answers as the program, and names the sandbox"},
		"socket-codes":       {"13", "the socket refuses with the codes of the table"},
		"resize-online":      {"12", "the mounted filesystem grows to its grown device, while somebody writes, and keeps its data"},
		"resize-again":       {"12", "a filesystem that fills its device already is a success"},
		"resize-far":         {"12", "a size that the device has not is refused with status 5"},
		"resize-limit":       {"12", "a device above the largest size that is right is refused with status 5"},
		"freeze-holds":       {"14", "a write waits while the volume is frozen"},
		"freeze-stats":       {"14", "stats are answered while the volume is frozen"},
		"freeze-twice":       {"14", "freeze of a frozen volume is refused, and leaves it frozen"},
		"freeze-thaw":        {"14", "thaw lets the writes go on"},
		"freeze-auto":        {"14", "when the time is over writes go on, without any call"},
		"thaw-idle":          {"14", "thaw of a volume that is not frozen is refused"},
		"thaw-late":          {"14", "thaw is refused when the time was over before, so that the asker learns of it"},
		"thaw-dead":          {"14", "thaw undoes the freeze of a sandbox that has died, or says that it ended with it (status 6); the device is free"},
	}
}
