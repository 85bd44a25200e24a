# PAGETILE_GIT_HASH: the commit of this checkout, with "-dirty" if files differ from it; "unknown" outside a checkout.
# A source archive unpacked inside somebody else's checkout is outside too, hence the look at the prefix.
set(PAGETILE_GIT_HASH unknown)
find_package(Git QUIET)
if(GIT_FOUND)
  set(git ${GIT_EXECUTABLE} -C ${PROJECT_SOURCE_DIR})
  execute_process(COMMAND ${git} rev-parse --show-prefix OUTPUT_VARIABLE prefix RESULT_VARIABLE failed ERROR_QUIET)
  string(STRIP "${prefix}" prefix)
  if(failed EQUAL 0 AND prefix STREQUAL "")
    execute_process(
      COMMAND ${git} describe --always --dirty --abbrev=12 --exclude=*
      OUTPUT_VARIABLE hash
      RESULT_VARIABLE failed
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
    )
    if(failed EQUAL 0)
      set(PAGETILE_GIT_HASH ${hash})
    endif()
  endif()
endif()
