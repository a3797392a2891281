package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
)

const mostSubject = 72

var subjectForm = regexp.MustCompile(`^[a-z0-9][a-z0-9 ,/._-]*: \S`)

// checkCommits looks at the messages of the commits after base. A clone that does not have base has nothing to check.
func checkCommits(base string) ([]string, error) {
	if exec.Command("git", "merge-base", "--is-ancestor", base, "HEAD").Run() != nil { //nolint:gosec // a commit of the budget
		return nil, nil
	}
	raw, err := exec.Command("git", "log", "--no-merges", "--format=%h%x00%s%x00%b%x01", base+"..HEAD").Output() //nolint:gosec // the same
	if err != nil {
		return nil, fmt.Errorf("git log: %w", err)
	}
	var found []string
	for one := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\x01") {
		if parts := strings.SplitN(strings.TrimSpace(one), "\x00", 3); len(parts) == 3 {
			found = append(found, checkMessage(parts[0], parts[1], parts[2])...)
		}
	}
	return found, nil
}

func checkMessage(commit, subject, body string) []string {
	var found []string
	if !subjectForm.MatchString(subject) {
		found = append(found, fmt.Sprintf("commit %s: the subject %q does not begin with an area: write \"area: what\"", commit, subject))
	}
	if len([]rune(subject)) > mostSubject {
		found = append(found, fmt.Sprintf("commit %s: the subject has more than %d characters", commit, mostSubject))
	}
	if strings.TrimSpace(body) == "" {
		found = append(found, fmt.Sprintf("commit %s: no body: say why", commit))
	}
	return found
}
